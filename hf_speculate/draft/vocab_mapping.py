"""Vocabulary mapping: which ids of a draft stand for which of the target, and a draft model that reads the latter."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_speculate.cache.base import KVCache
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.types import Scored

# Embedding tables are padded to multiples of 64 to 1,024 rows, for matrix kernels.
MAX_PADDING = 1024


@dataclass(frozen=True)
class VocabMapping:
    """Which of a draft's ids stand for which of the target's."""

    draft_ids: Tensor  # [V] int64, by target id, what the draft is fed for it; every entry is an id of the draft
    is_shared: Tensor  # [V] bool, by target id, whether the draft may propose it; at least one is
    is_padded: bool = False  # whether ids mean the same on both sides, so that only the ends of the vocabularies differ

    def to(self, device: torch.device) -> "VocabMapping":
        return replace(self, draft_ids=self.draft_ids.to(device), is_shared=self.is_shared.to(device))

    def target_logits(self, logits: Tensor) -> Tensor:
        """The draft's logits [..., V'] in the target's ids [..., V]; what the draft cannot propose is -inf."""
        if self.is_padded:
            return _resized(logits, len(self.is_shared))
        return logits.index_select(-1, self.draft_ids).masked_fill(~self.is_shared, -torch.inf)


def padding_mapping(num_target: int, num_draft: int) -> VocabMapping:
    """The mapping of one tokenizer and two models whose tables end at different lengths."""
    ids = torch.arange(num_target, device="cpu")  # those of the target alone lie in the padding and are never read
    return VocabMapping(ids.clamp_max(num_draft - 1), ids < num_draft, is_padded=True)


class TranslatedLanguageModel(LanguageModel):
    """A draft model that reads and scores the target's ids; the model itself stays as it is."""

    def __init__(self, vocabulary: VocabMapping, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.vocabulary = vocabulary.to(self.device)

    def run(self, query_token_ids: Tensor, kv_cache: KVCache, **options: Any) -> Scored:
        """Query [B, Q] and logits [B, Q', V] are in the target's ids."""
        scored = super().run(self.vocabulary.draft_ids[query_token_ids], kv_cache, **options)
        return scored._replace(logits=self.vocabulary.target_logits(scored.logits))


@dataclass(frozen=True)
class DraftVocabulary:
    """Maps the columns of a draft head's logits to ids of the target."""

    size: int  # V, of the target
    target_ids: Tensor | None = None  # [Vd] int64, those of the columns, increasing; None if column j is id j

    def ids(self, columns: Tensor) -> Tensor:
        return columns if self.target_ids is None else self.target_ids[columns]

    def scattered(self, logits: Tensor) -> Tensor:
        """[..., V] from logits [..., Vd]: -inf at every id that the head cannot propose."""
        if self.target_ids is None:
            return _resized(logits, self.size)
        full = logits.new_full((*logits.shape[:-1], self.size), -torch.inf)
        return full.index_copy_(-1, self.target_ids, logits)


def _resized(logits: Tensor, size: int) -> Tensor:
    """[..., size] from logits of the first ids: a view or one operator."""
    surplus = size - logits.shape[-1]
    return logits[..., :size] if surplus <= 0 else torch.nn.functional.pad(logits, (0, surplus), value=-torch.inf)
