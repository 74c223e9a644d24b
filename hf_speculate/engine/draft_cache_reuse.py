"""Carries a draft model's states from call to call."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_speculate.draft.base import Drafter
from hf_speculate.draft.hybrid import HybridDrafter
from hf_speculate.draft.model import ModelDrafter
from hf_speculate.draft.state import DraftSource, DraftState, HeldDraft
from hf_speculate.draft.vocab_mapping import Vocabulary
from hf_speculate.engine.batch import Batch
from hf_speculate.models.language_model import device_of
from hf_speculate.types import KVState


class Carrier:
    """Fills a call's draft cache from a `DraftState`, and the state from the cache when the call ends.

    Args:
        state: emptied when a call begins.
        draft: the draft model.
        vocabulary: how its ids stand to the target's; None: they are the same.
    """

    def __init__(self, state: DraftState, draft: PreTrainedModel, vocabulary: Vocabulary | None):
        self.state = state
        innermost = (module for module in draft.modules() if next(module.children(), None) is None)
        parts = tuple(weakref.ref(module) for module in innermost)
        ids = None if vocabulary is None else vocabulary.draft_ids
        adapted: list[Any] = [module for module in draft.modules() if hasattr(module, "merged_adapters")]
        adapters = tuple((*one.active_adapters, one.disable_adapters, *one.merged_adapters) for one in adapted)
        self._source = DraftSource(parts, device_of(draft), draft.dtype, adapters, ids)

    def recall(self, batch: Batch, drafter: Drafter | None) -> None:
        """Let the draft cache hold what the state has of the prompts; the same columns of every row.

        Args:
            batch: the rows, whose draft cache is empty.
            drafter: told what it need not read.
        """
        held = self.state.take()
        cache, pads = batch.draft_cache, batch.num_pads or []
        batch.num_valid = [0] * len(pads)
        if held is None or cache is None or not held.source.serves(self._source) or len(held.texts) != len(pads):
            return
        prompts = batch.tokens.token_ids[:, : batch.prompt_len]
        texts = [row[num:] for row, num in zip(prompts.tolist(), pads, strict=True)]
        num_columns = min(num + _num_shared(*pair) for num, *pair in zip(pads, held.texts, texts, strict=True))
        if num_columns <= min(pads):
            return  # of no row anything is left
        cache.update([_placed(state, pads, num_columns) for state in held.states])
        batch.num_held = [num_columns] * len(pads)
        batch.num_valid = [max(num_columns - num, 0) for num in pads]
        if isinstance(drafter, ModelDrafter | HybridDrafter):
            drafter.begin(prompts[:, :num_columns])

    def remember(self, batch: Batch) -> None:
        """Put what the draft cache holds of the rows' texts into the state, if that is all there."""
        cache, pads, counts = batch.draft_cache, batch.num_pads or [], batch.num_valid
        if cache is None or counts is None or not any(counts):
            return
        states = cache.first_tokens(counts)
        if states is None:
            return
        spans = zip(batch.tokens.token_ids.tolist(), pads, counts, strict=True)
        self.state.put(HeldDraft(self._source, [row[pad : pad + num] for row, pad, num in spans], states))


def make_carrier(
    state: DraftState | None, draft: PreTrainedModel | None, vocabulary: Vocabulary | None, text_mask: Tensor | None
) -> Carrier | None:
    """A call's carrier; None where there is nothing to carry.

    Args:
        state: the call's, or None.
        draft: the draft model, or None.
        vocabulary: see `Carrier`.
        text_mask: [B, T] int64, which of the prompts' ids are real; None: all. With holes, nothing is carried.
    """
    if state is None or draft is None:
        return None
    if text_mask is not None and bool((text_mask[:, 1:] < text_mask[:, :-1]).any()):
        return None
    return Carrier(state, draft, vocabulary)


def home_choice(choice: str, state: DraftState | None, draft: PreTrainedModel) -> str:
    """Where a draft's states go, by the choices of `speculation_cache`.

    Growing buffers of window layers forget what lies behind the window, and a state could not be cut back to what a
    later prompt shares; the dynamic home keeps all of a draft's states.

    Args:
        choice: what was asked for.
        state: the call's, or None.
        draft: the draft model.
    """
    if state is None or choice != "auto":
        return choice
    layers = DynamicCache(config=draft.config.get_text_config(decoder=True))
    return "dynamic" if any(layers.is_sliding) else choice


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens at the beginning that two texts have in common."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(place for place in range(length) if one[place] != other[place])


def _placed(state: KVState, num_pads: Sequence[int], num_columns: int) -> KVState:
    """States [B, H, num_columns, D] of rows with so much padding first, from [B, H, N, D] without any."""
    if not any(num_pads):
        return KVState(*(part[:, :, :num_columns] for part in state))
    device = state.keys.device
    places = torch.arange(num_columns, device=device) - torch.tensor(num_pads, device=device)[:, None]
    index = places.clamp(0, state.keys.shape[2] - 1)[:, None, :, None]  # padding is masked, whatever it holds
    keys, values = (_gathered(part, index) for part in state)
    return KVState(keys, values)


def _gathered(part: Tensor, index: Tensor) -> Tensor:
    """The columns `index` [B, 1, T, 1] of [B, H, N, D]."""
    return part.gather(2, index.expand(-1, part.shape[1], -1, part.shape[3]))
