"""Puts timed runs into plain values, for JSON."""

import functools
import math
import operator
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.bench.batches import Batch
from hf_speculate.tools.bench.drift import Drift
from hf_speculate.tools.bench.measuring import Run, ratios
from hf_speculate.tools.bench.methods import Method


def circumstances(target: PreTrainedModel, target_name: str, draft_name: str) -> dict[str, Any]:
    """What figures depend on beside the settings.

    Args:
        target: as loaded.
        target_name: as the user wrote it.
        draft_name: the same of the draft.
    """
    return {
        "versions": {
            "hf_speculate": _own_version(),
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "device": _device_name(target.device),
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "date": datetime.now(UTC).date().isoformat(),
        "target": target_name,
        "draft": draft_name,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median and maximum of at least one value."""
    return {"min": min(values), "median": median(values), "max": max(values)}


def finite(value: float) -> float | None:
    """The value, or None where it is one that JSON cannot hold."""
    return value if math.isfinite(value) else None


def total_stats(runs: Iterable[Run]) -> SpeculationStats | None:
    """Counts and seconds of all calls together; None if the method is not ours."""
    found = [run.stats for run in runs if run.stats is not None]
    return functools.reduce(operator.add, found) if found else None


def method_entry(method: Method, runs: Sequence[Run], plain: Sequence[Run], checked: str | None) -> dict[str, Any]:
    """One method's line; what its engine does not count is None.

    Args:
        method: that was timed.
        runs: its calls, at least one.
        plain: plain decoding's calls on the same batches.
        checked: how its texts compare; None: they were not compared, for they need not be equal.
    """
    stats = total_stats(runs)
    entry: dict[str, Any] = {
        "name": method.name,
        "verifier": method.verifier or None,
        "num_assistant_tokens": method.num_assistant_tokens,
        "is_lossy": method.is_lossy,
        "tokens_per_s": spread([run.tokens_per_s for run in runs]),
        "speedup": spread(ratios(runs, plain)),
        "num_tokens": sum(run.num_tokens for run in runs),
        "mean_acceptance_length": None,
        "acceptance_rate": None,
        "acceptance_rate_per_position": [],
        "seconds": None,
        "checked": checked,
    }
    one = runs[0].stats
    if stats is None or one is None:
        return entry
    if one.draft_lens:
        entry["draft_lens"] = list(one.draft_lens)
    return entry | {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_rate_per_position": stats.acceptance_rate_per_position,
        "rounds_by_draft_len": {str(num): count for num, count in sorted(stats.rounds_by_draft_len.items())},
        "seconds": stats.seconds_by_stage,
        "fallbacks": stats.fallbacks,
    }


def category_entries(
    method: Method, runs: Sequence[Run], plain: Sequence[Run], batches: Mapping[int, Batch]
) -> list[dict[str, Any]]:
    """One method's lines by category of prompts; none where prompts have no category.

    Args:
        method: that was timed.
        runs: its calls.
        plain: plain decoding's calls on the same batches.
        batches: by number.
    """
    entries = []
    for category in sorted({batch.category for batch in batches.values()} - {""}):
        of_it = [run for run in runs if batches[run.batch].category == category]
        stats = total_stats(of_it)
        entries.append(
            {
                "category": category,
                "method": method.name,
                "speedup": median(ratios(of_it, plain)),
                "acceptance_rate": None if stats is None else stats.acceptance_rate,
                "num_prompts": sum(len(run.texts) for run in of_it if run.repeat == 0),
            }
        )
    return entries


def drift_entry(method: Method, runs: Sequence[Run], plain: Sequence[Run], drift: Drift) -> dict[str, Any]:
    """One line of how far a method's texts lie from the target's own.

    Args:
        method: a lossy one, or plain decoding for reference.
        runs: its calls.
        plain: plain decoding's calls on the same batches.
        drift: of all its texts.
    """
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


def _added(ones: Sequence[int], others: Sequence[int]) -> list[int]:
    longest = max(len(ones), len(others))
    padded = [[*values, *[0] * (longest - len(values))] for values in (ones, others)]
    return [sum(pair) for pair in zip(*padded, strict=True)]


def _own_version() -> str:
    try:
        return version("hf-speculate")
    except PackageNotFoundError:  # run from a clone
        return "not installed"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text(encoding="utf-8").splitlines() if cpu_info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return (models or [platform.processor() or platform.machine()])[0]
