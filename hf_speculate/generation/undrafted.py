"""Prepare calls without a draft source: statistics, tokenizer and streamer."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_speculate.config import SpeculationConfig
from hf_speculate.generation.defaults import Defaults, is_nested, value_in
from hf_speculate.stats import SpeculationStats


def undrafted_config(model: PreTrainedModel, call: Mapping[str, Any]) -> SpeculationConfig:
    """Return the settings of a call without a draft source: only `speculation_stats`."""
    if is_nested():
        return SpeculationConfig()
    given = value_in(call, "speculation_stats")
    given = Defaults.of(model).values.get("speculation_stats") if given is None else given
    return SpeculationConfig(speculation_stats=given)


def add_tokenizer(
    model: PreTrainedModel, call: Mapping[str, Any], arguments: dict[str, Any]
) -> None:
    """Add the default tokenizer to a call without a tokenizer, because stop strings need one."""
    tokenizer = Defaults.of(model).values.get("tokenizer")
    if tokenizer is not None and call.get("tokenizer") is None:
        arguments["tokenizer"] = tokenizer


class WithoutPrompt(BaseStreamer):
    """Streamer that skips the prompt.

    It passes new tokens on to a streamer that has already received the prompt.
    """

    def __init__(self, streamer: BaseStreamer):
        self._streamer, self._is_prompt = streamer, True

    def put(self, value: Tensor) -> None:
        if not self._is_prompt:
            self._streamer.put(value)
        self._is_prompt = False

    def end(self) -> None:
        self._streamer.end()


class Undrafted(NamedTuple):
    """A call without a draft source.

    It holds the statistics and a callback that receives them after the call.
    """

    stats: SpeculationStats
    report: Callable[[SpeculationStats], object]

    @classmethod
    def of(cls, config: SpeculationConfig, refusal: str = "") -> "Undrafted":
        """Return empty statistics with the reason if a draft source was rejected."""
        undrafted = cls(*stats_of(config))
        undrafted.stats.has_draft_source = False
        if refusal:
            undrafted.stats.add_fallback(f"plain decoding: {refusal}")
        return undrafted


def stats_of(
    config: SpeculationConfig,
) -> tuple[SpeculationStats, Callable[[SpeculationStats], object]]:
    """Return empty statistics for a call and the callback that receives them at its end."""
    given = config.speculation_stats
    if given is None or isinstance(given, SpeculationStats):
        stats = SpeculationStats() if given is None else given
        stats.reset()
        return stats, lambda stats: None
    return SpeculationStats(), given
