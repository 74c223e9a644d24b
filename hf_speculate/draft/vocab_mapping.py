"""Vocabulary mapping: a draft model of another vocabulary reads and scores the target's ids."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_speculate.cache.base import KVCache
from hf_speculate.models.extra_inputs import ExtraInputs
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
        if self.is_padded:  # a view or one operator
            surplus = len(self.is_shared) - logits.shape[-1]
            return logits[..., :surplus] if surplus < 0 else nn.functional.pad(logits, (0, surplus), value=-torch.inf)
        return logits.index_select(-1, self.draft_ids).masked_fill(~self.is_shared, -torch.inf)


def padding_mapping(num_target: int, num_draft: int) -> VocabMapping:
    """The mapping of one tokenizer and two models whose tables end at different lengths."""
    ids = torch.arange(num_target, device="cpu")  # those of the target alone lie in the padding and are never read
    return VocabMapping(ids.clamp_max(num_draft - 1), ids < num_draft, is_padded=True)


class TranslatedLanguageModel(LanguageModel):
    """A draft model that reads and scores the target's ids; the model itself stays as it is."""

    def __init__(
        self,
        model: PreTrainedModel,
        vocabulary: VocabMapping,
        max_position: int | None = None,
        extra_inputs: ExtraInputs | None = None,
        keeps_states: bool = False,
    ):
        super().__init__(model, max_position, keeps_states, extra_inputs, is_draft=True)
        self.vocabulary = vocabulary.to(self.device)

    def run(
        self,
        query_token_ids: Tensor,
        kv_cache: KVCache,
        *,
        logits_to_keep: int | None = None,
        **forward_options: Any,
    ) -> Scored:
        """Query [B, Q] and logits [B, Q', V] are in the target's ids."""
        query = self.vocabulary.draft_ids[query_token_ids]  # [B, Q]
        scored = super().run(query, kv_cache, logits_to_keep=logits_to_keep, **forward_options)
        return scored._replace(logits=self.vocabulary.target_logits(scored.logits))
