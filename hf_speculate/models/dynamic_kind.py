"""The dynamic kind: transformers' own cache, which every model has."""

from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from hf_speculate.cache.base import KVCache
from hf_speculate.cache.dynamic import DynamicKVCache
from hf_speculate.cache.layers import fixed_layers
from hf_speculate.models.cache_kinds import Buffers, CacheKind, CachePlan, Start, windows_in
from hf_speculate.models.quirks import Limit, limit_reason


class DynamicKind(CacheKind):
    """States in transformers' dynamic cache."""

    def obstacle(self, plan: CachePlan, start: Start) -> str:
        quirk = "" if start.cache is None else limit_reason(start.model, Limit.ONLY_PREALLOCATED)
        return quirk if quirk and windows_in(start.layers) != {None} else ""

    def make(self, plan: CachePlan, start: Start, batch_size: int, buffers: Buffers) -> KVCache:
        cache = start.cache
        if cache is None:
            # A draft's layers are all full ones, so that K forwards in a row can be rolled back at once.
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache()) if plan.crosses else DynamicCache()
        fixed = fixed_layers(start.model.config.get_text_config(decoder=True))
        return DynamicKVCache(cache, batch_size, start.attention_mask, start.device, fixed)


KIND = DynamicKind()
