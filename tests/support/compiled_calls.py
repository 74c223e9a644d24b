"""Calls that run compiled on a CPU, and the small models for them."""

from functools import cache

from transformers import CompileConfig

import hf_speculate
from tests.cases import new_pair

K = 2
LAYERS = {  # few, because compiling takes the more time the more there are
    "llama": {"num_hidden_layers": 1},
    "gemma2": {"num_hidden_layers": 2},  # one with a window, one without
    "gpt2": {"n_layer": 1},
}


@cache
def small_pair(family):
    """As `tests.cases.pair`; what one test compiles for it serves the others."""
    return new_pair(family, **LAYERS[family])


def compile_config(backend="eager", **options):
    """transformers compiles on a CPU only with this flag, which its own tests set too."""
    config = CompileConfig(backend=backend, mode=options.pop("mode", "default"), **options)
    config._compile_all_devices = True
    return config


def compiled_and_eager(target, draft, inputs, config, **options):
    """Ids by compiled rounds and by eager ones, and the statistics of the first."""
    options = {"max_new_tokens": 24, "num_assistant_tokens": K, "assistant_model": draft, **options}
    eager = target.generate(**inputs, **options)
    stats = hf_speculate.SpeculationStats()
    ids = target.generate(**inputs, **options, compile_config=config, speculation_stats=stats)
    return ids, eager, stats
