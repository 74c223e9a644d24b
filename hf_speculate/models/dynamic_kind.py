"""The dynamic kind: transformers' own cache, which every model has."""

from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from hf_speculate.cache.base import KVCache
from hf_speculate.cache.dynamic import DynamicKVCache
from hf_speculate.cache.layers import fixed_layers
from hf_speculate.models.cache_kinds import GROWING, Buffers, CacheKind, CacheRequest, windows_in
from hf_speculate.models.quirks import Limit, limit_reason


class DynamicKind(CacheKind):
    """States in transformers' dynamic cache."""

    def obstacle(self, request: CacheRequest) -> str:
        quirk = "" if request.cache is None else limit_reason(request.model, Limit.ONLY_PREALLOCATED)
        return quirk if quirk and windows_in(request.layers) != {None} else ""

    def make(self, request: CacheRequest, batch_size: int, buffers: Buffers = GROWING) -> KVCache:
        cache = request.cache
        if cache is None:
            # A draft's layers are all full ones, so that K forwards in a row can be rolled back at once.
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache()) if request.crosses else DynamicCache()
        fixed = fixed_layers(request.model.config.get_text_config(decoder=True))
        return DynamicKVCache(cache, batch_size, request.attention_mask, request.device, fixed)


KIND = DynamicKind()
