"""Train a Uno adapter for the bundled target, and save it in PEFT's format.

    cd examples && python -m training.train_uno    # minutes, and ten to write the text

The text is the same as for the EAGLE-3 head, `training/train_eagle3.py`. In every step, the target
reads blocks at random columns of a few rows: a token of the text followed by random ids, to which
the adapter is applied. At each of these slots, the adapter learns the distribution that the target
has after the text. The target does not change.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import DynamicCache, LlamaForCausalLM

from hf_speculate.compat import CACHE_NAME
from training.eagle3.rows import draw_rows
from training.eagle3.target_rows import EXAMPLES, add_row_arguments, load_target_rows
from training.pair.clock import warm_then_linear

WARMUP = 0.05
SHORTEST_CONTEXT = 8
PRINTED_EVERY = 20  # steps
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Settings(NamedTuple):
    """Settings for training an adapter."""

    rank: int = 32
    alpha: float = 64.0
    block_size: int = 4  # tokens per block, including the token of the text
    rows_per_step: int = 2
    blocks_per_row: int = 48
    greedy_share: float = 0.75  # share of rows generated greedily
    lr: float = 4e-3


class Adapter:
    """Adapter weights by module name in the target, and hooks that apply them."""

    def __init__(self, target: LlamaForCausalLM, settings: Settings):
        self.is_noise: Tensor | None = None  # [Q, 1], adapted tokens; None for none
        self.weights: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        self._scale = settings.alpha / settings.rank
        for name, module in target.named_modules():
            if name.endswith(NAMES) and isinstance(module, nn.Linear):
                down = torch.randn(settings.rank, module.in_features) / math.sqrt(
                    module.in_features
                )
                up = torch.zeros(module.out_features, settings.rank)
                self.weights[name] = nn.Parameter(down), nn.Parameter(up)
                module.register_forward_hook(self._hook(name))

    def parameters(self) -> list[nn.Parameter]:
        return [weight for pair in self.weights.values() for weight in pair]

    def _hook(self, name: str) -> Any:
        def add(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            if self.is_noise is None:
                return output
            down, up = self.weights[name]
            return output + self._scale * linear(self.is_noise * linear(args[0], down), up)

        return add

    def save(self, folder: Path, settings: Settings) -> None:
        """Write the config and the weights in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "examples/pair/target",
            "r": settings.rank,
            "lora_alpha": settings.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": list(NAMES),
        }
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        sides = {
            f"{name}.lora_{side}.weight": weight.detach().bfloat16()
            for name, pair in self.weights.items()
            for side, weight in zip("AB", pair, strict=True)
        }
        save_file(sides, folder / "adapter_model.safetensors")


def block_logits(
    target: LlamaForCausalLM, adapter: Adapter, ids: Tensor, starts: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Return logits at the noise tokens of N blocks with F tokens per row, and at the text there.

    Both are [R, N, F - 1, V].

    Args:
        target: model that reads the blocks.
        adapter: adapter for the noise tokens.
        ids: [R, T] int64, the text.
        starts: [R, N] int64, columns of the first tokens of the blocks.
        block_size: F.
    """
    (num_rows, num_blocks), width = starts.shape, ids.shape[1]
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        read = target.model(ids, **{CACHE_NAME: cache}).last_hidden_state
    blocks = torch.randint(1, target.config.vocab_size, (num_rows, num_blocks, block_size))
    blocks[:, :, 0] = ids.gather(1, starts)
    slots = torch.arange(block_size)
    positions = (starts[:, :, None] + slots).flatten(1)  # [R, N * F]
    block_of = torch.arange(num_blocks).repeat_interleave(block_size)
    sees_text = torch.arange(width) < starts.repeat_interleave(block_size, 1)[:, :, None]
    slot_of = slots.repeat(num_blocks)
    sees_block = (block_of[:, None] == block_of) & (slot_of[:, None] >= slot_of)
    seen = torch.cat([sees_text, sees_block.expand(num_rows, -1, -1)], dim=2)[:, None]
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)  # [R, 1, N * F, T + N * F]
    adapter.is_noise = (slot_of > 0).float()[:, None]
    states = target.model(
        blocks.flatten(1), attention_mask=mask, position_ids=positions, **{CACHE_NAME: cache}
    ).last_hidden_state
    adapter.is_noise = None
    noise_states = states.unflatten(1, (num_blocks, block_size))[:, :, 1:]
    columns = (starts[:, :, None] + slots[1:]).flatten(1)[:, :, None]
    text_states = read.gather(1, columns.expand(-1, -1, read.shape[2])).view_as(noise_states)
    return target.lm_head(noise_states), target.lm_head(text_states)


def step_loss(
    target: LlamaForCausalLM, adapter: Adapter, ids: Tensor, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy over rows [R, T], and the argmax agreement by slot [F - 1]."""
    num_starts = ids.shape[1] - settings.block_size - SHORTEST_CONTEXT
    starts = SHORTEST_CONTEXT + torch.rand(len(ids), num_starts).argsort(1)
    starts = starts[:, : settings.blocks_per_row]  # [R, N]
    logits, taught = block_logits(target, adapter, ids, starts, settings.block_size)
    loss = nn.functional.cross_entropy(logits.flatten(0, 2), taught.flatten(0, 2).softmax(-1))
    hits = (logits.argmax(-1) == taught.argmax(-1)).float().mean((0, 1))
    return loss, hits


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_row_arguments(parser)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--output", type=Path, default=EXAMPLES.parent / "build" / "uno")
    args = parser.parse_args()
    settings = Settings()
    target, batches = load_target_rows(args)
    target.requires_grad_(False)
    torch.manual_seed(args.seed)
    adapter = Adapter(target, settings)
    optimizer = torch.optim.AdamW(
        adapter.parameters(), settings.lr, betas=(0.9, 0.95), weight_decay=0.0
    )
    start_s = time.perf_counter()
    for step in range(args.steps):
        rows = draw_rows(batches[:-1], settings.rows_per_step, settings.greedy_share, step)
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * warm_then_linear(step / args.steps, WARMUP)
        loss, hits = step_loss(target, adapter, rows.ids, settings)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(adapter.parameters(), 1.0)
        optimizer.step()
        if step % PRINTED_EVERY == 0 or step == args.steps - 1:
            shares = " ".join(f"{share:.2f}" for share in hits.tolist())
            print(f"{step} {time.perf_counter() - start_s:.0f} s {loss:.3f} {shares}", flush=True)
            adapter.save(args.output, settings)


if __name__ == "__main__":
    main()
