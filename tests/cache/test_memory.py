"""Compare peak tensor memory with plain `generate` plus the draft's cache."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import DynamicCache, PreTrainedModel

import hf_speculate
from hf_speculate.cache.preallocated import MaskSpec, PreallocatedKVCache
from hf_speculate.cache.ragged_layer import MIN_STEP
from hf_speculate.models.inferencer import MIN_CHUNK_TOKENS
from hf_speculate.types import KVState
from tests.cases import each_value
from tests.support.tiny import make_config, make_model

ALLOWED = 1.05
PROMPT_LEN = 2 * MIN_CHUNK_TOKENS + 1
SIZES = {"intermediate_size": 64, "max_position_embeddings": 2048}


class LiveBytes(TorchDispatchMode):
    """Context that counts the bytes of live storages."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            key, num_bytes = storage._cdata, storage.nbytes()
            if key not in self._known and key not in given:
                self._known.add(key)
                self.held += num_bytes
                weakref.finalize(storage, self._forget, key, num_bytes)
        self.peak = max(self.peak, self.held)
        return result

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.remove(key)
        self.held -= num_bytes


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_iter(tree) if isinstance(leaf, Tensor)]


def peak_bytes(call: Callable[[], Any]) -> int:
    gc.collect()
    with LiveBytes() as live:
        call()
    return live.peak


def make_pair(draft_width: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    target = make_model("llama", dtype=torch.float32, num_hidden_layers=6, **SIZES)
    draft = make_model(
        "llama",
        dtype=torch.float32,
        num_hidden_layers=1,
        **{**SIZES, "intermediate_size": draft_width},
    )
    return target, draft


@each_value(num_rows=[1, 3], draft_width=[64, 160])
def test_long_prompt_peaks_at_plain_plus_the_draft_cache(num_rows: int, draft_width: int) -> None:
    """Leave out weights, because they would only widen the margin."""
    target, draft = make_pair(draft_width)
    ids = torch.randint(3, 64, (num_rows, PROMPT_LEN), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 6}
    plain = peak_bytes(lambda: target.generate(**inputs))
    draft_options = {
        "assistant_model": draft,
        "num_assistant_tokens": 3,
        "num_assistant_tokens_schedule": "constant",
    }
    ours = peak_bytes(lambda: hf_speculate.generate(target, **inputs, **draft_options))
    # keys and values, heads, width, bytes
    draft_cache = num_rows * (PROMPT_LEN + 6) * 2 * 2 * 8 * 4
    assert ours <= ALLOWED * (plain + draft_cache)


@pytest.mark.parametrize("max_columns", [None, 1500])
def test_growing_cache_peaks_slightly_above_its_states(max_columns: int | None) -> None:
    num_layers, num_steps = 8, 20
    ours = PreallocatedKVCache(
        MaskSpec((None,) * num_layers, {}, torch.float32), 2, max_columns=max_columns
    )
    theirs = DynamicCache()

    def grow(update: Callable[[list[KVState]], None]) -> None:
        for num_query in (1200, *[15] * num_steps):
            update([KVState(*torch.ones(2, 2, 2, num_query, 8))] * num_layers)

    def append(states: list[KVState]) -> None:
        for index, state in enumerate(states):
            theirs.update(state.keys, state.values, index)

    assert peak_bytes(lambda: grow(ours.update)) <= ALLOWED * peak_bytes(lambda: grow(append))
    assert ours.num_columns == theirs.get_seq_length() == 1200 + 15 * num_steps


def test_returned_cache_is_not_held_twice() -> None:
    num_layers, num_tokens = 40, 500
    kept_cache = DynamicCache(config=make_config("llama", num_hidden_layers=num_layers))
    kv_cache = PreallocatedKVCache(
        MaskSpec((None,) * num_layers, {}, torch.float32), 2, kept_cache=kept_cache
    )
    state = KVState(torch.ones(2, 2, num_tokens, 8), torch.ones(2, 2, num_tokens, 8))

    def fill() -> None:
        kv_cache.update([state] * num_layers)
        kv_cache.hand_back()

    num_kept_bytes = num_layers * 2 * state.keys.nbytes
    assert peak_bytes(fill) <= ALLOWED * (num_tokens + MIN_STEP) / num_tokens * num_kept_bytes
    assert all(torch.equal(layer.keys, state.keys) for layer in kept_cache.layers)


@pytest.mark.parametrize("prefill_chunk_size", [None, 200])
def test_wide_draft_reads_its_prompt_in_even_chunks(prefill_chunk_size: int | None) -> None:
    target, draft = make_pair(80)
    lens: list[int] = []
    draft.model.embed_tokens.register_forward_pre_hook(
        lambda _, args: lens.append(args[0].shape[1])
    )
    ids = torch.arange(PROMPT_LEN)[None] % 61 + 3
    options = {"max_new_tokens": 4, "prefill_chunk_size": prefill_chunk_size}
    plain = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
    ours = hf_speculate.generate(
        target, ids, assistant_model=draft, num_assistant_tokens=2, **options
    )
    assert torch.equal(plain, ours)
    # the prompt and one token
    first = [257, 257] if prefill_chunk_size is None else [172, 171, 171]
    assert lens[: len(first)] == first
    assert max(lens[len(first) :]) <= 3
