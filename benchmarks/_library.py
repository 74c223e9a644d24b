"""Forwards as this library runs them inside a speculative call."""

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.cache.base import KVCache
from hf_speculate.models.attention_names import folded_attention_for
from hf_speculate.models.cache_kinds import CacheRequest, choose_kind, find_kind
from hf_speculate.models.language_model import LanguageModel

DEFAULT_SCHEDULE = "adaptive"  # used without `num_assistant_tokens`
CACHES = ("auto", "dynamic", "preallocated")


def as_in_a_call(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """Make forwards of `model` compute attention as in a speculative `generate()`."""
    return folded_attention_for([model])


def make_forward(
    model: PreTrainedModel, batch_size: int, mask: Tensor | None
) -> tuple[LanguageModel, KVCache]:
    """Return the forward of this library, and an empty cache of the kind that it selects.

    Args:
        model: the target or the draft.
        batch_size: B.
        mask: [B, T] int64 over the tokens that the cache will hold.
            None without padding.
    """
    request = CacheRequest(model, None, mask, model.device)
    cache = find_kind(choose_kind(request)[0]).make(request, batch_size)
    return LanguageModel(model, keeps_states=False), cache
