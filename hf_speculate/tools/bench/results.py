"""Compare decoding methods, and summarise timed calls as JSON values."""

import functools
import math
import operator
import platform
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.bench.decoding import (
    Batch,
    Decoder,
    OnStep,
    Run,
    Runs,
    measure,
    of_equal_texts,
    ratios,
)
from hf_speculate.tools.bench.methods import PLAIN, Method, plain_method
from hf_speculate.tools.bench.quality import Drift, TextCheck, drift_of_runs
from hf_speculate.tools.checks.cost_model import size_of

MIN_CALLS = 5
# ratio of the maximum to the minimum of plain decoding's time per token; below 1.2 on idle machines
MAX_SPREAD = 1.5
NOISE_MARGIN = 1.1
_SAMPLE_TOKENS = 120  # number of tokens in each method's sample text


def environment(device: torch.device) -> dict[str, Any]:
    try:
        package_version = version("hf-speculate")
    except PackageNotFoundError:  # running from a clone
        package_version = "not installed"
    return {
        "versions": {
            "hf_speculate": package_version,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text(encoding="utf-8").splitlines() if cpu_info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return (models or [platform.processor() or platform.machine()])[0]


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Compute minimum, median and maximum; None if there is no value."""
    known = [value for value in values if value is not None]
    return {"min": min(known), "median": median(known), "max": max(known)} if known else None


def finite(value: float) -> float | None:
    """Replace infinity and NaN with None, because JSON supports neither."""
    return value if math.isfinite(value) else None


def total_stats(runs: Iterable[Run]) -> SpeculationStats | None:
    """Add up the statistics of all calls; None for other engines."""
    stats = [run.stats for run in runs if run.stats is not None]
    return functools.reduce(operator.add, stats) if stats else None


def method_entry(
    method: Method,
    runs: Sequence[Run],
    plain: Sequence[Run],
    checked: str | None,
    cost: float = 0.0,
) -> dict[str, Any]:
    """Summarise one method; values that its engine does not count are None."""
    stats, first = total_stats(runs), runs[0].stats
    speedups, bound = ratios(runs, plain), None
    if stats is not None:
        bound = speedup_bound(stats, 0.0 if "prompt_lookup_num_tokens" in method.fields else cost)
    entry: dict[str, Any] = {
        "name": method.name,
        "engine": method.engine,
        "verifier": method.verifier or None,
        "num_assistant_tokens": method.num_assistant_tokens,
        "is_lossy": method.is_lossy,
        "tokens_per_s": spread(run.tokens_per_s for run in runs),
        "speedup": spread(speedups),
        "speedup_bound": bound,
        "is_noise": bound is not None and median(speedups) > NOISE_MARGIN * bound,
        "first_token_s": spread(run.first_token_s for run in runs),
        "ms_per_token": spread(run.ms_per_token for run in runs),
        "peak_bytes": max(
            (run.peak_bytes for run in runs if run.peak_bytes is not None), default=None
        ),
        "num_tokens": sum(run.num_tokens for run in runs),
        "mean_acceptance_length": stats and stats.mean_acceptance_length,
        "acceptance_rate": stats and stats.acceptance_rate,
        "acceptance_rate_per_position": stats.acceptance_rate_per_position if stats else [],
        "seconds": stats and stats.seconds_by_stage,
        "checked": checked,
    }
    if first is not None and first.draft_lens:
        entry["draft_lens"] = list(first.draft_lens)
    if stats is not None:
        entry |= {name: stats.as_dict()[name] for name in ("rounds_by_draft_len", "fallbacks")}
    return entry


def category_entries(
    method: Method, runs: Sequence[Run], plain: Sequence[Run]
) -> list[dict[str, Any]]:
    """Summarise one method by category of prompts; empty if there are no categories."""
    categories: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        categories[run.batch.category].append(run)
    return [
        {
            "category": category,
            "method": method.name,
            "speedup": median(ratios(category_runs, plain)),
            "acceptance_rate": (stats := total_stats(category_runs)) and stats.acceptance_rate,
            "num_prompts": sum(len(run.texts) for run in category_runs if run.repeat == 0),
        }
        for category, category_runs in sorted(categories.items())
        if category
    ]


def drift_entry(
    method: Method, runs: Sequence[Run], plain: Sequence[Run], drift: Drift
) -> dict[str, Any]:
    """Summarise speed and drift of a lossy method, or of plain decoding for reference."""
    return {
        "verifier": method.verifier or method.name,
        "posterior_threshold": method.fields.get("posterior_threshold"),
        "posterior_alpha": method.fields.get("posterior_alpha"),
        "tokens_per_s": median(run.tokens_per_s for run in runs),
        "speedup": median(ratios(runs, plain)),
        "log_likelihood_per_token": finite(drift.log_likelihood_per_token),
        "agreement_with_greedy": drift.agreement,
        "num_tokens": drift.num_tokens,
    }


def reliability(plain: Sequence[Run], repeats: int, num_prompts: int) -> dict[str, Any]:
    """Decide whether a benchmark is reliable, and list the reasons if not."""
    reasons = []
    if len(plain) < MIN_CALLS:
        counts = ((num_prompts, "prompt"), (repeats, "repeat"))
        words = ", ".join(f"{count} {noun}{'s' * (count != 1)}" for count, noun in counts)
        reasons.append(f"{words}: not reliable; use more prompts or repeats")
    times = [time for run in plain if (time := run.ms_per_token) is not None]
    if times and max(times) > MAX_SPREAD * min(times):
        reasons.append(
            f"plain decoding took {min(times):.3g} to {max(times):.3g} ms per token: the machine "
            "was busy, not reliable"
        )
    return {"is_reliable": not reasons, "reasons": reasons}


def counted_runs(runs: Runs, methods: Sequence[Method], reasons: list[str]) -> tuple[Runs, str]:
    """Select the calls with equal texts.

    If there are none, return all calls and append a reason for doubt to `reasons`.

    Returns:
        The runs by method, and a sentence with their number.
    """
    equal, plain = of_equal_texts(runs, methods), methods[0].name
    num_equal, num_runs = len(equal[plain]), len(runs[plain])
    words = (
        f"{num_equal} of {num_runs} calls of each method, whose greedy texts are equal in all "
        "exact methods"
    )
    if num_equal or not num_runs:
        return equal, words
    reasons.append(
        "no greedy text is equal in all exact methods: speeds are of different texts; use --dtype "
        "float32"
    )
    return runs, words


def draft_cost(target: PreTrainedModel, draft: PreTrainedModel | None) -> float:
    """Estimate a draft step's cost in target steps from bytes read; 0 without a draft model."""
    if draft is None:
        return 0.0
    return size_of(draft).num_read_bytes() / size_of(target).num_read_bytes()


def speedup_bound(stats: SpeculationStats, cost: float) -> float | None:
    """Return an upper bound on the speed-up at the measured acceptance.

    A round is assumed to take one plain step, plus `cost` plain steps per drafted position.
    """
    num_drafted = sum(draft_len * count for draft_len, count in stats.rounds_by_draft_len.items())
    steps = stats.num_batch_rounds + cost * num_drafted
    return stats.num_longest / steps if steps else None


@dataclass(frozen=True)
class Comparison:
    # at least one method besides plain decoding; all or none of them sample
    methods: Sequence[Method]
    drift_methods: Sequence[Method]  # lossy methods, of which only speed and drift are measured
    batches: Sequence[Batch]  # at least one
    repeats: int = 1  # calls per method and batch
    seed: int = 0  # seed for sampling

    @property
    def all_methods(self) -> list[Method]:
        """All timed methods, plain decoding first.

        For drift, both greedy and sampled plain decoding are measured.
        """
        do_sample = self.methods[0].do_sample
        others = [plain_method(not do_sample)] if self.drift_methods else []
        return [plain_method(do_sample), *others, *self.methods, *self.drift_methods]

    @property
    def num_steps(self) -> int:
        """Number of calls, including warm-ups."""
        return len(self.all_methods) * (1 + len(self.batches) * self.repeats)

    def run(self, decoder: Decoder, on_step: OnStep) -> dict[str, Any]:
        """Time all methods, compare their outputs with plain decoding, and measure drift.

        Ctrl-C during timing skips the comparison and the drift.
        """
        methods = self.all_methods
        measured = measure(
            methods, self.batches, decoder, repeats=self.repeats, seed=self.seed, on_step=on_step
        )
        check, cost = TextCheck(decoder), draft_cost(decoder.target, decoder.draft)
        base, left_out = methods[0], dict(measured.left_out)
        plain = measured.runs.get(base.name, [])
        entries, categories, drift, is_interrupted = [], [], [], measured.is_interrupted
        doubts = reliability(plain, self.repeats, sum(len(batch.rows) for batch in self.batches))[
            "reasons"
        ]
        reported, checked = [base] if plain else [], {}
        for method in self.methods:
            if (runs := measured.runs.get(method.name)) is None:
                continue
            if not (method.do_sample or method.is_lossy or is_interrupted):
                try:
                    compared = check(method, runs, plain)
                except KeyboardInterrupt:
                    is_interrupted = True
                else:
                    checked[method.name] = str(compared)
                    if compared.num_wrong:
                        left_out[method.name] = (
                            f"its output differs from plain decoding's: {compared}"
                        )
                        continue
            reported.append(method)
        counted, num_counted = measured.runs, None
        if reported and not base.do_sample:
            counted, num_counted = counted_runs(measured.runs, reported, doubts)
        for method in reported:
            if not (runs := counted[method.name]):  # interrupted before the first counted run
                continue
            sample = {"sample": _text(decoder, runs[0].texts[0][:_SAMPLE_TOKENS])}
            entries.append(
                method_entry(method, runs, counted[base.name], checked.get(method.name), cost)
                | sample
            )
            if method is not base:
                categories += category_entries(method, runs, counted[base.name])
        for method in methods if self.drift_methods and not is_interrupted else ():
            if method.engine == PLAIN or method in self.drift_methods:
                runs = measured.runs[method.name]
                drift.append(drift_entry(method, runs, plain, drift_of_runs(decoder.target, runs)))
        return {
            "methods": entries,
            "categories": categories,
            "drift": drift,
            "counted": num_counted,
            "reliability": {"is_reliable": not doubts, "reasons": doubts},
            "prompt": _text(decoder, self.batches[0].rows[0][-_SAMPLE_TOKENS:]),
            "is_interrupted": is_interrupted,
            "left_out": left_out,
        }


def _text(decoder: Decoder, token_ids: list[int] | Tensor) -> str | None:
    tokenizer = decoder.tokenizer
    return None if tokenizer is None else str(tokenizer.decode(token_ids, skip_special_tokens=True))
