"""Calls that transformers decodes, because nothing drafts: their statistics, tokenizer and streamer."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_speculate.config import SpeculationConfig
from hf_speculate.generation.defaults import Defaults, is_nested, value_in
from hf_speculate.stats import SpeculationStats


def undrafted_config(model: PreTrainedModel, call: Mapping[str, Any]) -> SpeculationConfig:
    """Return the settings of a call that nothing drafts for: where its statistics go."""
    if is_nested():
        return SpeculationConfig()
    given = value_in(call, "speculation_stats")
    given = Defaults.of(model).values.get("speculation_stats") if given is None else given
    return SpeculationConfig(speculation_stats=given)


def add_tokenizer(model: PreTrainedModel, call: Mapping[str, Any], arguments: dict[str, Any]) -> None:
    """Add the tokenizer that `enable` was given to the arguments of a call without one; stop strings need it."""
    tokenizer = Defaults.of(model).values.get("tokenizer")
    if tokenizer is not None and call.get("tokenizer") is None:
        arguments["tokenizer"] = tokenizer


class WithoutPrompt(BaseStreamer):
    """Hands tokens on to a streamer that has the prompt already."""

    def __init__(self, streamer: BaseStreamer):
        self._streamer, self._is_prompt = streamer, True

    def put(self, value: Tensor) -> None:
        if not self._is_prompt:
            self._streamer.put(value)
        self._is_prompt = False

    def end(self) -> None:
        self._streamer.end()


class Undrafted(NamedTuple):
    """The statistics of a call that transformers decodes, and what gets them when it has ended."""

    stats: SpeculationStats
    report: Callable[[SpeculationStats], object]

    @classmethod
    def of(cls, config: SpeculationConfig, refusal: str = "") -> "Undrafted":
        """Return empty statistics, with the reason if a source was refused."""
        undrafted = cls(*stats_of(config))
        undrafted.stats.has_draft_source = False
        if refusal:
            undrafted.stats.add_fallback(f"plain decoding: {refusal}")
        return undrafted


def stats_of(config: SpeculationConfig) -> tuple[SpeculationStats, Callable[[SpeculationStats], object]]:
    """Return the statistics that a call fills in, empty, and what gets them when it has ended."""
    given = config.speculation_stats
    if given is None or isinstance(given, SpeculationStats):
        stats = SpeculationStats() if given is None else given
        stats.reset()
        return stats, lambda stats: None
    return SpeculationStats(), given
