"""Draft cache reuse: a `DraftState` holds a draft model's KV states between calls."""

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
    """The draft cache reuse of one call.

    It fills the draft cache from a `DraftState`, and updates the state at the end of the call.
    Finished rows stay in the batch.
    """

    def __init__(
        self, state: DraftState, key: DraftCacheKey, kv_cache: KVCache, num_pads: Sequence[int]
    ):
        self._state, self._key, self._kv_cache = state, key, kv_cache
        self._num_pads = num_pads  # [B] number of padding tokens before each prompt
        # [B] number of tokens of each row known to be in the draft cache
        self._num_valid = [0] * len(num_pads)

    def recall(self, batch: Batch) -> int:
        """Fill the empty draft cache with the longest common prefix of all rows.

        Return the number of filled columns.
        """
        saved, pads = self._state.take(), self._num_pads
        if saved is None or saved.key != self._key or len(saved.token_ids) != len(pads):
            return 0
        prompts = batch.tokens.token_ids[:, : batch.prompt_len]
        texts = [row[num_pads:] for row, num_pads in zip(prompts.tolist(), pads, strict=True)]
        num_columns = min(
            num_pads + _num_shared(*pair)
            for num_pads, *pair in zip(pads, saved.token_ids, texts, strict=True)
        )
        if num_columns <= min(pads):
            return 0  # every row would hold only padding
        self._kv_cache.update([_left_padded(state, pads, num_columns) for state in saved.kv_states])
        self._num_valid = [max(num_columns - num_pads, 0) for num_pads in pads]
        return num_columns

    def note(self, batch: Batch, certain: Sequence[int]) -> None:
        """Record how many of the `certain` [B] columns are cached; finished rows keep their count.

        A finished row is fed tokens of other rows.
        """
        rows = zip(self._num_valid, certain, self._num_pads, batch.was_live, strict=True)
        valid = [max(count - pad, 0) if live else num_valid for num_valid, count, pad, live in rows]
        lens = self._kv_cache.num_real_tokens
        self._num_valid = [min(count, length) for count, length in zip(valid, lens, strict=True)]

    def remember(self, batch: Batch) -> None:
        """Store the rows' KV states in the `DraftState` if the cache still has all of them."""
        counts = self._num_valid
        states = self._kv_cache.first_tokens(counts) if any(counts) else None
        if states is not None:
            spans = zip(batch.tokens.token_ids.tolist(), self._num_pads, counts, strict=True)
            self._state.put(
                SavedDraftCache(
                    self._key, [row[pad : pad + count] for row, pad, count in spans], states
                )
            )


def make_draft_cache_reuse(
    plan: Plan, draft: PreTrainedModel, kv_cache: KVCache
) -> DraftCacheReuse | None:
    """Make the draft cache reuse of a call.

    Return None if there is no `DraftState`, if the draft model has inputs besides tokens, or if
    masks have holes.
    """
    call, vocabulary = plan.call, plan.source.vocabulary
    state, mask = plan.config.draft_state, call.prompts.text_mask
    if state is None or not call.draft_inputs.is_empty:
        return None
    if mask is not None and bool((mask[:, 1:] < mask[:, :-1]).any()):
        return None
    modules = modules_of(draft)
    leaves = tuple(
        weakref.ref(module) for module in modules if next(module.children(), None) is None
    )
    adapted: list[Any] = [module for module in modules if hasattr(module, "merged_adapters")]
    adapters = tuple(
        (*module.active_adapters, module.disable_adapters, *module.merged_adapters)
        for module in adapted
    )
    table = None if vocabulary is None else vocabulary.table
    key = DraftCacheKey(leaves, device_of(draft), dtype_of(draft), adapters, table)
    return DraftCacheReuse(state, key, kv_cache, call.prompts.num_pads)


def _num_shared(mine: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(mine, other, strict=False))
    return next(
        (position for position, (left, right) in pairs if left != right), min(len(mine), len(other))
    )


def _left_padded(state: KVState, num_pads: Sequence[int], num_columns: int) -> KVState:
    """Pad states [B, H, N, D] on the left to [B, H, num_columns, D]."""
    if not any(num_pads):
        return KVState(*(tensor[:, :, :num_columns] for tensor in state))
    device = state.keys.device
    columns = (
        torch.arange(num_columns, device=device) - torch.tensor(num_pads, device=device)[:, None]
    )
    columns = columns.clamp(0, state.keys.shape[2] - 1)  # padding is masked
    return KVState(*(gathered(tensor, columns) for tensor in state))
