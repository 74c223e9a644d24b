"""Let the target write conversations, and keep the states for a head.

Every row is a conversation of fixed length: user turns are fed token by token, and the target
answers in between. A batch therefore needs no padding, and no row waits for another.
"""

import random
from collections import deque
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import rotate_half

from training.smollm2.seed_prompts import next_turn, question

BATCH_SIZE = 64
ROW_LEN = 512
# Longer answers would repeat themselves, so they are cut off, and the next user turn follows.
MAX_ANSWER_LEN = 160
TEMPERATURE = 0.7  # temperature for the sampled half of the rows


class Conversations(NamedTuple):
    """Rows written by the target, with their states."""

    ids: Tensor  # [R, W] int32
    is_written: Tensor  # [R, W] bool, whether the target chose the token
    aux: Tensor  # [R, W, A * D] bfloat16, inputs of the auxiliary layers
    hidden: Tensor  # [R, W, D] float16, last states, inputs of the target's output matrix
    logsumexp: Tensor  # [R, W] float32, of the logits over the whole vocabulary


class Turns:
    """User turns of one row, as tokens.

    This class also decides when a turn starts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int):
        self.draw = random.Random(seed)
        self.tokenizer = tokenizer
        self.num_answered = 0
        first = [{"role": "user", "content": question(self.draw)}]
        self.forced = deque(
            self._encode(
                tokenizer.apply_chat_template(first, tokenize=False, add_generation_prompt=True)
            )
        )

    def next_id(self, chosen: int) -> tuple[int, bool]:
        """Return the next token of the row, and whether the target chose it."""
        if self.forced:
            return self.forced.popleft(), False
        self.num_answered += 1
        if chosen == self.tokenizer.eos_token_id or self.num_answered == MAX_ANSWER_LEN:
            self.num_answered = 0
            turn = f"\n<|im_start|>user\n{next_turn(self.draw)}<|im_end|>\n<|im_start|>assistant\n"
            self.forced.extend(self._encode(turn))
            return self.tokenizer.eos_token_id, chosen == self.tokenizer.eos_token_id
        return chosen, True

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


class Stepper:
    """Llama forward over one token per row.

    Its buffers hold all keys and values. The decoding loop in transformers copies the entire cache
    at every step, which takes half of the time at this batch size.
    """

    def __init__(
        self, model: LlamaForCausalLM, batch_size: int, row_len: int, aux_layers: list[int]
    ):
        self.model, self.aux_layers, self.length = model, aux_layers, 0
        config = model.config
        self.head_dim, self.num_kv_heads = config.head_dim, config.num_key_value_heads
        shape = (
            config.num_hidden_layers,
            2,
            batch_size,
            config.num_key_value_heads,
            row_len,
            config.head_dim,
        )
        self.states = torch.zeros(shape, dtype=model.dtype)
        positions = torch.arange(row_len)[None]
        self.cos, self.sin = model.model.rotary_emb(self.states, positions)  # [1, W, D]

    def step(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Feed tokens [B] int64, and return aux layer inputs [B, A * D] and last states [B, D]."""
        x, aux = self.model.model.embed_tokens(ids), []
        for index, layer in enumerate(self.model.model.layers):
            if index in self.aux_layers:
                aux.append(x)
            x = x + self._attend(index, layer.self_attn, layer.input_layernorm(x))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.length += 1
        return torch.cat(aux, dim=-1), self.model.model.norm(x)

    def _attend(self, index: int, attention: nn.Module, x: Tensor) -> Tensor:
        column, keys, values = self.length, *self.states[index]
        cos, sin = self.cos[:, column], self.sin[:, column]  # [1, D]
        # [B, H, D]
        query, key, value = (
            getattr(attention, f"{name}_proj")(x).unflatten(-1, (-1, self.head_dim))
            for name in "qkv"
        )
        query, key = (states * cos + rotate_half(states) * sin for states in (query, key))
        keys[:, :, column], values[:, :, column] = key, value
        # The query heads of each key-value head become rows of one product.
        query = query.unflatten(1, (self.num_kv_heads, -1))  # [B, Hkv, G, D]
        # [B, Hkv, G, D]
        mixed = nn.functional.scaled_dot_product_attention(
            query, keys[:, :, : column + 1], values[:, :, : column + 1]
        )
        return attention.o_proj(mixed.flatten(1))


@torch.inference_mode()
def write_conversations(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, aux_layers: list[int], seed: int
) -> Conversations:
    """Write one batch, with the first half of the rows greedy and the other half sampled."""
    turns = [Turns(tokenizer, seed * BATCH_SIZE + row) for row in range(BATCH_SIZE)]
    generator = torch.Generator().manual_seed(seed)
    stepper = Stepper(target, BATCH_SIZE, ROW_LEN, aux_layers)
    ids = torch.tensor([row.next_id(-1)[0] for row in turns])  # [B]
    columns = []
    is_written = torch.zeros(BATCH_SIZE, dtype=torch.bool)
    for _ in range(ROW_LEN):
        aux, hidden = stepper.step(ids)
        logits = target.lm_head(hidden).float()  # [B, V]
        columns.append(
            (
                ids.int(),
                is_written,
                aux.to(torch.bfloat16),
                hidden.to(torch.float16),
                logits.logsumexp(-1),
            )
        )
        chosen = logits.argmax(-1)
        probs = (logits[BATCH_SIZE // 2 :] / TEMPERATURE).softmax(-1)
        chosen[BATCH_SIZE // 2 :] = torch.multinomial(probs, 1, generator=generator)[:, 0]
        pairs = [row.next_id(token) for row, token in zip(turns, chosen.tolist(), strict=True)]
        ids, is_written = (torch.tensor(list(column)) for column in zip(*pairs, strict=True))
    return Conversations(*(torch.stack(column, 1) for column in zip(*columns, strict=True)))


def write_batches(
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    aux_layers: list[int],
    folder: Path,
    numbers: range,
    seed: int,
) -> None:
    """Write the batches `numbers` to `folder`, one file each; existing files are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        path = folder / f"{number:04d}.pt"
        if path.is_file():
            continue
        rows = write_conversations(target, tokenizer, aux_layers, seed * 100_003 + number)
        partial = path.with_suffix(".partial")
        torch.save(tuple(rows), partial)
        partial.replace(path)
        print(f"{path.name}: {rows.is_written.sum()} tokens written", flush=True)
