"""Flags measurements that are few or scattered, and speed-ups above the bound of the pair."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.bench.measuring import Run
from hf_speculate.tools.checks.cost_model import size_of

MIN_CALLS = 5
MAX_SPREAD = 1.5  # of plain decoding's time per token, maximum over minimum; on idle machines it was below 1.2
NOISE_MARGIN = 1.1


def doubts(plain: Sequence[Run], repeats: int, num_prompts: int) -> list[str]:
    """Reasons why a benchmark is not reliable, in words; empty if there are none."""
    found = []
    if len(plain) < MIN_CALLS:
        found.append(
            f"{_count(num_prompts, 'prompt')}, {_count(repeats, 'repeat')}: not reliable; use more prompts or repeats"
        )
    times = [time for run in plain if (time := run.ms_per_token) is not None]
    if times and max(times) > MAX_SPREAD * min(times):
        found.append(
            f"plain decoding took {min(times):.3g} to {max(times):.3g} ms per token: the machine was busy, not reliable"
        )
    return found


def draft_cost(target: PreTrainedModel, draft: PreTrainedModel | None) -> float:
    """Bytes that a draft step reads over those that a target step reads; 0 without a draft model."""
    if draft is None:
        return 0.0
    target_size, draft_size = (size_of(one, one.config.get_text_config(decoder=True)) for one in (target, draft))
    return draft_size.num_read_bytes() / target_size.num_read_bytes()


def speedup_bound(stats: SpeculationStats, cost: float) -> float | None:
    """Speed-up with the realised acceptance if a round took one plain step and `cost` for each drafted position."""
    num_drafted = sum(num * count for num, count in stats.rounds_by_draft_len.items())
    steps = stats.num_batch_rounds + cost * num_drafted
    return stats.num_longest / steps if steps else None


def _count(num: int, noun: str) -> str:
    return f"{num} {noun}{'s' * (num != 1)}"
