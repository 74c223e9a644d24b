"""Decodes a batch with plain, assisted or speculative generation, as the demo compares them."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

import hf_speculate
from demo_report import Method
from hf_speculate.models.foreign_code import KNOWN_PACKAGES
from models import EAGLE3, PAIR, Models

KNOWN_PACKAGES.add(__name__.partition(".")[0])  # the hooks here count forwards, or treat each token by itself

ROW_COST = 0.2  # of one more row in a step of decoding: measured with SmolLM2-135M on two cores
MAX_PROMPT_TOKENS = 512
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
GREEDY = {"do_sample": False}
ASSISTED_K = 5  # of transformers' assisted generation
PLAIN_GREEDY, OURS_GREEDY = (Method(engine, "greedy", 1, False) for engine in ("plain", "hf_speculate"))


@dataclass
class Pair:
    """A target in one dtype, and the options of `generate()` that say what drafts for it."""

    target: PreTrainedModel
    drafting: dict[str, Any]  # ours
    assisted: dict[str, Any]  # of transformers' assisted generation
    num_assistant_tokens: int | None  # of ours; None for the default schedule
    head: hf_speculate.DraftHead | None = None  # drafts for lines of their own
    num_target_calls: int = 0


class Timing(NamedTuple):
    """Seconds of plain greedy decoding of one prompt."""

    prompt_s: float
    token_s: float

    def of_method(self, method: Method, num_tokens: int) -> float:
        """Estimate of one run of a method, as if no drafted token was accepted."""
        num_runs, num_rows = (method.batch_size, 1) if method.engine == "transformers" else (1, method.batch_size)
        step_s = self.token_s * (1 + ROW_COST * (num_rows - 1))
        return num_runs * (num_rows * self.prompt_s + num_tokens * step_s)


def methods(num_rows: int, has_head: bool, is_sampled_too: bool) -> list[Method]:
    """Every line of the table; transformers' assisted generation decodes a batch row by row."""
    lines = []
    modes = {"greedy": ["greedy"], "sampled": ["rejection", "typical"]} if is_sampled_too else {"greedy": ["greedy"]}
    for batch_size in (1, num_rows):
        for mode, verifiers in modes.items():
            is_sampled = mode == "sampled"
            lines.append(Method("plain", mode, batch_size, is_sampled))
            if batch_size == 1 or not is_sampled:
                assisted = f"assisted {mode}" if batch_size == 1 else "assisted, row by row"
                lines.append(Method("transformers", assisted, batch_size, is_sampled))
            lines += [Method("hf_speculate", verifier, batch_size, is_sampled) for verifier in verifiers]
            if has_head and not is_sampled:
                lines.append(Method("hf_speculate", "greedy", batch_size, is_sampled, has_head=True))
    return lines


def load_pair(folder: Path, dtype: torch.dtype, num_assistant_tokens: int | None) -> Pair:
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=dtype).eval()
    draft = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=dtype).eval()
    # It shares the draft's weights and always drafts as many tokens.
    fixed_draft = copy.copy(draft)
    fixed_draft.generation_config = copy.deepcopy(draft.generation_config)
    fixed_draft.generation_config.update(
        num_assistant_tokens=num_assistant_tokens or ASSISTED_K,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    drafting, assisted = ({"assistant_model": model} for model in (draft, fixed_draft))
    head = hf_speculate.load_drafter(EAGLE3, target) if folder == PAIR else None
    return counted(Pair(target, drafting, assisted, num_assistant_tokens, head))


def as_pair(models: Models, num_assistant_tokens: int | None) -> Pair:
    """The examples' model with its draft head, which transformers does not take."""
    target = hf_speculate.disable(models.target)  # plain decoding and transformers' own drafts are measured too
    assisted = {"prompt_lookup_num_tokens": num_assistant_tokens or ASSISTED_K}
    return counted(Pair(target, models.options, assisted, num_assistant_tokens))


def counted(pair: Pair) -> Pair:
    def count_call(*_: Any) -> None:  # a function, which a copy of the target shares
        pair.num_target_calls += 1

    pair.target.register_forward_hook(count_call)
    return pair


def encode(tokenizer: PreTrainedTokenizerBase, prompts: list[str], batch_size: int) -> list[dict[str, Tensor]]:
    """Left-padded batches; of a long prompt the last `MAX_PROMPT_TOKENS` tokens are kept."""
    tokenizer.padding_side = tokenizer.truncation_side = "left"
    how = {"return_tensors": "pt", "padding": True, "truncation": True, "max_length": MAX_PROMPT_TOKENS}
    batches = []
    for start in range(0, len(prompts), batch_size):
        encoded = tokenizer(prompts[start : start + batch_size], **how)
        batches.append({"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]})
    return batches


def decode(
    method: Method, pair: Pair, inputs: dict[str, Tensor], max_new_tokens: int, seed: int, callback: Any = None
) -> tuple[Tensor, hf_speculate.SpeculationStats | None]:
    """One `generate()` call: the new tokens [B, N] and, of ours, what it counted."""
    fields = {**inputs, **(SAMPLING if method.is_sampled else GREEDY), "max_new_tokens": max_new_tokens}
    stats = None
    if method.engine == "hf_speculate":
        stats = hf_speculate.SpeculationStats()
        num_drafted = pair.num_assistant_tokens
        fixed = {"num_assistant_tokens": num_drafted, "num_assistant_tokens_schedule": "constant"}
        sequences = hf_speculate.generate(
            pair.target,
            **fields,
            **({"assistant_model": pair.head} if method.has_head else pair.drafting),
            verifier=method.mode,
            **(fixed if num_drafted else {}),
            seed=seed,
            speculation_stats=stats,
            speculation_callback=callback,
        )
    elif method.engine == "transformers":
        torch.manual_seed(seed)
        sequences = assist_row_by_row(pair, fields)
    else:
        torch.manual_seed(seed)
        sequences = pair.target.generate(**fields)
    return sequences[:, inputs["input_ids"].shape[1] :], stats


def assist_row_by_row(pair: Pair, fields: dict[str, Any]) -> Tensor:
    """Transformers' assisted generation, which takes one row; shorter rows are padded with EOS."""
    names = ("input_ids", "attention_mask")
    eos = pair.target.generation_config.eos_token_id
    rows = [
        pair.target.generate(**{**fields, **{name: fields[name][row : row + 1] for name in names}}, **pair.assisted)[0]
        for row in range(len(fields["input_ids"]))
    ]
    return pad_sequence(rows, batch_first=True, padding_value=(eos[0] if isinstance(eos, list) else eos) or 0)


def texts_of(token_ids: Tensor, eos_token_id: int | list[int] | None) -> list[list[int]]:
    """The tokens [B, N] of each row up to and with its first EOS."""
    return [row[: count_tokens(row[None], eos_token_id)].tolist() for row in token_ids]


def count_tokens(token_ids: Tensor, eos_token_id: int | list[int] | None) -> int:
    """Tokens [B, N] up to and with each row's first EOS."""
    if eos_token_id is None:
        return token_ids.numel()
    has_ended = torch.isin(token_ids, torch.as_tensor(eos_token_id)).int().cumsum(1)  # [B, N]
    is_counted = torch.cat([torch.ones_like(has_ended[:, :1]), has_ended[:, :-1] == 0], dim=1)  # [B, N]
    return int(is_counted.sum())
