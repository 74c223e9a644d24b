"""Prepare calls without a draft source: statistics, seed, tokenizer and streamer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_speculate.config import SpeculationConfig
from hf_speculate.generation.config_sources import fields_of, read_config
from hf_speculate.generation.defaults import Defaults, is_nested
from hf_speculate.stats import SpeculationStats

_KEPT = ("speculation_stats", "seed", "generator")


def undrafted_config(
    model: PreTrainedModel, call: Mapping[str, Any], saved: Mapping[str, Any]
) -> SpeculationConfig:
    """Return the settings that also apply without a draft source: statistics and the seed."""
    if is_nested():
        return SpeculationConfig()
    defaults = Defaults.of(model).values
    keywords = {
        name: call[name]
        for name in _KEPT
        if name in call and (call[name] is not None or name not in defaults)
    }
    passed, model_fields = (
        fields_of(call.get("generation_config")),
        fields_of(model.generation_config),
    )
    return read_config(
        {name: source[name] for name in _KEPT if name in source}
        for source in (keywords, passed, defaults, saved, model_fields)
    )


@contextmanager
def seeded(config: SpeculationConfig, device: torch.device, *, samples: bool) -> Iterator[None]:
    """Seed torch's random numbers of the CPU and a device; restore them after the block.

    An int seed has the effect of `torch.manual_seed`. With a list, all rows share one seed computed
    from its values. No other thread may draw random numbers from torch within the block.
    """
    if not samples or (config.seed is None and config.generator is None):
        yield
        return
    seeds = config.row_seeds(
        len(config.seed) if isinstance(config.seed, Sequence) else 1, do_sample=True
    )
    seed = int((seeds * torch.arange(1, len(seeds) + 1)).sum())
    devices = [] if device.type in ("cpu", "meta") else [device.index or 0]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed all devices
        if device.type == "cuda":
            torch.cuda.default_generators[devices[0]].manual_seed(seed)
        elif devices:
            torch.get_device_module(device.type).manual_seed(seed)
        yield


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
    """A call without a draft source."""

    stats: SpeculationStats
    report: Callable[[SpeculationStats], object]  # receives the statistics after the call
    config: SpeculationConfig
    samples: bool = False  # whether the call may sample

    @classmethod
    def of(
        cls, config: SpeculationConfig, refusal: str = "", *, samples: bool = False
    ) -> "Undrafted":
        """Return empty statistics with the reason if a draft source was rejected."""
        undrafted = cls(*stats_of(config), config, samples)
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
