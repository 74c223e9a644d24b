"""Provide compiled calls on a CPU, and small models for them."""

from functools import cache

from transformers import CompileConfig

import hf_speculate
from tests.cases import new_pair

K = 2
LAYERS = {  # few layers, because compile time grows with their number
    "llama": {"num_hidden_layers": 1},
    "gemma2": {"num_hidden_layers": 2},  # one layer with a window, one without
    "gpt2": {"n_layer": 1},
}


@cache
def small_pair(family):
    """Return small models as `tests.cases.pair` does; tests share their compiled code."""
    return new_pair(family, **LAYERS[family])


def compile_config(backend="eager", **options):
    """Return a config that lets transformers compile on a CPU."""
    config = CompileConfig(backend=backend, mode=options.pop("mode", "default"), **options)
    config._compile_all_devices = True
    return config


def compiled_and_eager(target, draft, inputs, config, **options):
    """Return the ids of compiled and of eager rounds, and the statistics of the compiled call."""
    options = {"max_new_tokens": 24, "num_assistant_tokens": K, "assistant_model": draft, **options}
    eager = target.generate(**inputs, **options)
    stats = hf_speculate.SpeculationStats()
    ids = target.generate(**inputs, **options, compile_config=config, speculation_stats=stats)
    return ids, eager, stats
