"""Draft cache reuse: a draft model's KV states are kept in a `DraftState` from one call to the next."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_speculate.cache.base import KVCache, gathered
from hf_speculate.engine.batch import Batch
from hf_speculate.engine.plan import Plan
from hf_speculate.models.language_model import device_of, dtype_of
from hf_speculate.models.module_walk import modules_of
from hf_speculate.options.draft_state.state import DraftCacheKey, DraftState, SavedDraftCache
from hf_speculate.types import KVState


class DraftCacheReuse:
    """Fills a call's draft cache from a `DraftState`, and the state at the end; finished rows stay in the batch."""

    def __init__(self, state: DraftState, key: DraftCacheKey, kv_cache: KVCache, num_pads: Sequence[int]):
        self._state, self._key, self._kv_cache = state, key, kv_cache
        self._num_pads = num_pads  # [B] padding tokens before each prompt
        self._num_valid = [0] * len(num_pads)  # [B] real tokens of each row that the draft cache holds for sure

    def recall(self, batch: Batch) -> int:
        """Fill the empty draft cache with the longest common beginning of all rows; the columns of every row then."""
        saved, pads = self._state.take(), self._num_pads
        if saved is None or saved.key != self._key or len(saved.token_ids) != len(pads):
            return 0
        prompts = batch.tokens.token_ids[:, : batch.prompt_len]
        texts = [row[num:] for row, num in zip(prompts.tolist(), pads, strict=True)]
        num_columns = min(num + _num_shared(*pair) for num, *pair in zip(pads, saved.token_ids, texts, strict=True))
        if num_columns <= min(pads):
            return 0  # nothing is left of any row
        self._kv_cache.update([_left_padded(state, pads, num_columns) for state in saved.kv_states])
        self._num_valid = [max(num_columns - num, 0) for num in pads]
        return num_columns

    def note(self, batch: Batch, certain: Sequence[int]) -> None:
        """Record how much of `certain` [B] columns the cache holds; a finished row is fed tokens of other rows."""
        rows = zip(self._num_valid, certain, self._num_pads, batch.was_live, strict=True)
        valid = [max(num - pad, 0) if live else known for known, num, pad, live in rows]
        lens = self._kv_cache.num_real_tokens
        self._num_valid = [min(num, length) for num, length in zip(valid, lens, strict=True)]

    def remember(self, batch: Batch) -> None:
        """Put the states of the rows' tokens into the state, if they are all there."""
        counts = self._num_valid
        states = self._kv_cache.first_tokens(counts) if any(counts) else None
        if states is not None:
            spans = zip(batch.tokens.token_ids.tolist(), self._num_pads, counts, strict=True)
            self._state.put(SavedDraftCache(self._key, [row[pad : pad + num] for row, pad, num in spans], states))


def make_draft_cache_reuse(plan: Plan, draft: PreTrainedModel, kv_cache: KVCache) -> DraftCacheReuse | None:
    """The reuse of a call; None if there is nothing to reuse, or if the mask of the text has holes."""
    call, vocabulary = plan.call, plan.source.vocabulary
    state, mask = plan.config.draft_state, call.prompts.text_mask
    if state is None or not call.draft_inputs.is_empty:
        return None
    if mask is not None and bool((mask[:, 1:] < mask[:, :-1]).any()):
        return None
    modules = modules_of(draft)
    parts = tuple(weakref.ref(module) for module in modules if next(module.children(), None) is None)
    adapted: list[Any] = [module for module in modules if hasattr(module, "merged_adapters")]
    adapters = tuple((*module.active_adapters, module.disable_adapters, *module.merged_adapters) for module in adapted)
    table = None if vocabulary is None else vocabulary.table
    key = DraftCacheKey(parts, device_of(draft), dtype_of(draft), adapters, table)
    return DraftCacheReuse(state, key, kv_cache, call.prompts.num_pads)


def _num_shared(mine: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(mine, other, strict=False))
    return next((position for position, (left, right) in pairs if left != right), min(len(mine), len(other)))


def _left_padded(state: KVState, num_pads: Sequence[int], num_columns: int) -> KVState:
    """States [B, H, num_columns, D] of left-padded rows, from [B, H, N, D] without padding."""
    if not any(num_pads):
        return KVState(*(part[:, :, :num_columns] for part in state))
    device = state.keys.device
    columns = torch.arange(num_columns, device=device) - torch.tensor(num_pads, device=device)[:, None]
    columns = columns.clamp(0, state.keys.shape[2] - 1)  # padding is masked, whatever it holds
    return KVState(*(gathered(part, columns) for part in state))
