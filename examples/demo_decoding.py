"""Decode a batch with plain, assisted or speculative generation for the demo."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

import hf_speculate
from demo_report import Line
from hf_speculate.tools.bench.decoding import Batch, Decoder, Run
from hf_speculate.tools.bench.methods import OURS, PLAIN, TRANSFORMERS, Method
from models import EAGLE3, PAIR, Models

# relative cost of one more row in a decoding step, measured with SmolLM2-135M on two cores
ROW_COST = 0.2
MAX_PROMPT_TOKENS = 512
SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
ASSISTED_K = 5  # K of transformers' assisted generation
PLAIN_GREEDY, OURS_GREEDY = (Line(engine, "greedy", 1, False) for engine in (PLAIN, OURS))


@dataclass
class Pair:
    """Target with the fields for each engine."""

    decoder: Decoder
    assisted: dict[str, Any]  # fields for transformers' assisted generation
    num_assistant_tokens: int | None  # K of hf_speculate; None for the default schedule
    head: hf_speculate.DraftHead | None = None  # draft head for additional lines

    @property
    def target(self) -> PreTrainedModel:
        return self.decoder.target

    def method(self, line: Line, callback: Any = None) -> Method:
        """Return the method for a line; rounds of hf_speculate are reported to `callback`."""
        fields: dict[str, Any] = {}
        if line.engine == TRANSFORMERS:
            fields = self.assisted
        elif line.engine == OURS:
            fields = {"verifier": line.mode} | (
                {} if callback is None else {"speculation_callback": callback}
            )
            fields |= constant(self.num_assistant_tokens) if self.num_assistant_tokens else {}
            fields |= {"assistant_model": self.head} if line.has_head else {}
        return Method(line.name, line.engine, fields, line.is_sampled)


def constant(draft_len: int) -> dict[str, Any]:
    """Return the fields for a constant draft length."""
    return {"num_assistant_tokens": draft_len, "num_assistant_tokens_schedule": "constant"}


class Timing(NamedTuple):
    """Time of plain greedy decoding for one prompt."""

    prompt_s: float
    token_s: float

    def of_line(self, line: Line, num_tokens: int) -> float:
        """Estimate how long one run of a line takes if no draft is accepted, in seconds."""
        num_runs, num_rows = (
            (line.batch_size, 1) if line.engine == TRANSFORMERS else (1, line.batch_size)
        )
        step_s = self.token_s * (1 + ROW_COST * (num_rows - 1))
        return num_runs * (num_rows * self.prompt_s + num_tokens * step_s)


def methods(num_rows: int, has_head: bool, is_sampled_too: bool) -> list[Line]:
    """Return all lines of the table; transformers decodes a batch row by row."""
    lines = []
    modes = (
        {"greedy": ["greedy"], "sampled": ["rejection", "typical"]}
        if is_sampled_too
        else {"greedy": ["greedy"]}
    )
    for batch_size in (1, num_rows):
        for mode, verifiers in modes.items():
            is_sampled = mode == "sampled"
            lines.append(Line(PLAIN, mode, batch_size, is_sampled))
            if batch_size == 1 or not is_sampled:
                assisted = f"assisted {mode}" if batch_size == 1 else "assisted, row by row"
                lines.append(Line(TRANSFORMERS, assisted, batch_size, is_sampled))
            lines += [Line(OURS, verifier, batch_size, is_sampled) for verifier in verifiers]
            if has_head and not is_sampled:
                lines.append(Line(OURS, "greedy", batch_size, is_sampled, has_head=True))
    return lines


def load_pair(folder: Path, dtype: torch.dtype, num_assistant_tokens: int | None) -> Pair:
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=dtype).eval()
    draft = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=dtype).eval()
    decoder = Decoder(target, {"assistant_model": draft}, SAMPLING)
    head = hf_speculate.load_drafter(EAGLE3, decoder.target) if folder == PAIR else None
    return Pair(decoder, constant(num_assistant_tokens or ASSISTED_K), num_assistant_tokens, head)


def as_pair(models: Models, num_assistant_tokens: int | None) -> Pair:
    """Return the example model with its draft head, which transformers does not support."""
    # Plain decoding and assisted generation in transformers are measured too.
    target = hf_speculate.disable(models.target)
    assisted = {"prompt_lookup_num_tokens": num_assistant_tokens or ASSISTED_K}
    return Pair(Decoder(target, models.options, SAMPLING), assisted, num_assistant_tokens)


def encode(tokenizer: PreTrainedTokenizerBase, prompts: list[str], batch_size: int) -> list[Batch]:
    """Return left-padded batches; long prompts are cut to the last `MAX_PROMPT_TOKENS` tokens."""
    tokenizer.padding_side = tokenizer.truncation_side = "left"
    options = {
        "return_tensors": "pt",
        "padding": True,
        "truncation": True,
        "max_length": MAX_PROMPT_TOKENS,
    }
    batches = []
    for number, start in enumerate(range(0, len(prompts), batch_size)):
        encoded = tokenizer(prompts[start : start + batch_size], **options)
        batches.append(Batch(number, encoded["input_ids"], encoded["attention_mask"]))
    return batches


def decode(
    line: Line, pair: Pair, batch: Batch, max_new_tokens: int, seed: int, callback: Any = None
) -> Run:
    """Decode a batch with the method of a line."""
    return pair.decoder(pair.method(line, callback), batch, seed, max_new_tokens)
