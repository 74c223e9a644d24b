"""Compare a head with plain decoding and assisted generation on held-out questions."""

import functools
import time
from collections import Counter
from statistics import median
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_speculate
from models import HEAD_SETTINGS, chat_prompt
from smollm2_head.drafter import HeadDrafter
from smollm2_head.head import DraftHead

BATCH_SIZES = (1, 8)
MAX_PROMPT_TOKENS = 512
GREEDY = {"do_sample": False}


class Method(NamedTuple):
    """One line of the table."""

    name: str
    options: dict[str, Any]  # arguments of `generate()`
    is_ours: bool


class Run(NamedTuple):
    """One call."""

    num_tokens: int
    seconds: float
    stats: hf_speculate.SpeculationStats | None
    token_ids: Tensor  # [B, N]


def methods(head: DraftHead, num_draft_tokens: int) -> list[Method]:
    """Return the methods to measure; transformers drafts for only one row."""
    alone, both = (
        {
            "drafter": functools.partial(HeadDrafter, head, **settings),
            "num_assistant_tokens": num_draft_tokens,
        }
        for settings in ({**HEAD_SETTINGS, "copies": False}, HEAD_SETTINGS)
    )
    return [
        Method("plain", {}, False),
        Method("transformers, prompt lookup", {"prompt_lookup_num_tokens": 10}, False),
        Method("hf_speculate, prompt lookup", {"prompt_lookup_num_tokens": 10}, True),
        Method("hf_speculate, head", alone, True),
        Method("hf_speculate, head and copies", both, True),
    ]


def run(
    target: PreTrainedModel, method: Method, inputs: dict[str, Tensor], max_new_tokens: int
) -> Run:
    """Decode one batch greedily."""
    stats = hf_speculate.SpeculationStats() if method.is_ours else None
    ours = {"speculation_stats": stats} if method.is_ours else {}
    generate = (
        functools.partial(hf_speculate.generate, target) if method.is_ours else target.generate
    )
    begin = time.perf_counter()
    output = generate(**inputs, **GREEDY, max_new_tokens=max_new_tokens, **method.options, **ours)
    seconds = time.perf_counter() - begin
    token_ids = output[:, inputs["input_ids"].shape[1] :]
    # After its end, a row is padded with the end token, of which only the first one counts.
    has_ended = (token_ids == target.generation_config.eos_token_id).int().cumsum(1)
    num_tokens = int((has_ended == 0).sum() + (has_ended.amax(1) > 0).sum())
    return Run(num_tokens, seconds, stats, token_ids)


def measure(
    target: PreTrainedModel,
    head: DraftHead,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[str],
    max_new_tokens: int,
    num_draft_tokens: int,
) -> list[dict[str, Any]]:
    """Measure one record per method and batch size; methods take turns on every batch.

    The ratio of a batch is relative to plain decoding of the same batch; both include the prefill.
    """
    tokenizer.padding_side = tokenizer.truncation_side = "left"
    tokenizer_options = {
        "return_tensors": "pt",
        "padding": True,
        "truncation": True,
        "max_length": MAX_PROMPT_TOKENS,
    }
    records = []
    for batch_size in BATCH_SIZES:
        all_methods = methods(head, num_draft_tokens)
        if batch_size > 1:
            all_methods = [method for method in all_methods if method.is_ours or not method.options]
        runs: dict[str, list[Run]] = {method.name: [] for method in all_methods}
        for start in range(0, len(questions), batch_size):
            prompts = [
                chat_prompt(tokenizer, question)
                for question in questions[start : start + batch_size]
            ]
            encoded = tokenizer(prompts, add_special_tokens=False, **tokenizer_options)
            inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
            if not start:
                for method in all_methods:
                    run(target, method, inputs, 8)  # warms up
            for method in all_methods if start // batch_size % 2 == 0 else reversed(all_methods):
                runs[method.name].append(run(target, method, inputs, max_new_tokens))
            print(
                f"{batch_size} rows, {start + len(prompts)} of {len(questions)} questions",
                flush=True,
            )
        records += [
            record(name, batch_size, method_runs, runs["plain"])
            for name, method_runs in runs.items()
        ]
    return records


def record(name: str, batch_size: int, runs: list[Run], plain: list[Run]) -> dict[str, Any]:
    """Summarise the runs of a method."""
    speeds = [call.num_tokens / call.seconds for call in runs]
    ratios = sorted(
        speed / (other.num_tokens / other.seconds)
        for speed, other in zip(speeds, plain, strict=True)
    )
    same = [
        ours.tolist() == theirs.tolist()
        for call, other in zip(runs, plain, strict=True)
        for ours, theirs in zip(call.token_ids, other.token_ids, strict=True)
        if call.token_ids.shape == other.token_ids.shape
    ]
    result: dict[str, Any] = {
        "method": name,
        "rows": batch_size,
        "batches": len(runs),
        "tokens_per_s": median(speeds),
        "ratio": {"min": ratios[0], "median": median(ratios), "max": ratios[-1]},
        "identical_rows": sum(same),
        "num_rows": sum(len(call.token_ids) for call in runs),
    }
    stats = [call.stats for call in runs if call.stats is not None]
    if stats:
        num_rounds, num_emitted = (
            sum(getattr(stats_of_run, key) for stats_of_run in stats)
            for key in ("num_rounds", "num_emitted")
        )
        num_accepted, num_drafted = (
            sum(getattr(stats_of_run, key) for stats_of_run in stats)
            for key in ("num_accepted", "num_drafted")
        )
        result["tokens_per_round"] = num_emitted / max(num_rounds, 1)
        result["accepted_per_drafted"] = num_accepted / max(num_drafted, 1)
        lens = sum((Counter(stats_of_run.rounds_by_draft_len) for stats_of_run in stats), Counter())
        result["rounds_by_draft_len"] = dict(sorted(lens.items()))
    return result
