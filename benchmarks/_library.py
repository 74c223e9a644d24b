"""What the installed library offers, found out in this one place, so that no benchmark asks by itself."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_speculate.config import SpeculationConfig
from hf_speculate.errors import ConfigError
from hf_speculate.infer.kv_cache import DynamicKVCache, KVCache
from hf_speculate.infer.language_model import LanguageModel


def accepts(**field: Any) -> bool:
    """Whether the library takes this value of a field."""
    try:
        SpeculationConfig(**field)
    except ConfigError:
        return False
    return True


HAS_ADAPTIVE = accepts(num_assistant_tokens_schedule="adaptive")
DEFAULT_SCHEDULE = "adaptive" if HAS_ADAPTIVE else "constant"  # with `num_assistant_tokens` left out
CACHES = tuple(name for name in ("auto", "dynamic", "preallocated") if accepts(speculation_cache=name))


def as_in_a_call(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """Inside, forwards of `model` attend as they do within a speculative `generate()`."""
    return nullcontext(model)


def make_forward(model: PreTrainedModel, batch_size: int, mask: Tensor | None) -> tuple[LanguageModel, KVCache]:
    """The library's own forward and an empty cache of the kind that it takes by itself.

    Args:
        model: the target or the draft.
        batch_size: B.
        mask: [B, T] int64 over the tokens about to be put into the cache; None where nothing is padded.
    """
    cache = DynamicKVCache(DynamicCache(), batch_size, mask, model.device)
    return LanguageModel(model, keeps_states=False), cache
