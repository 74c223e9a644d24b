"""The model drafter: drafts with a smaller model."""

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.cache.base import KVCache
from hf_speculate.draft.base import Drafter, DraftRequest
from hf_speculate.draft.token_choice import DraftSettings, TokenChooser
from hf_speculate.errors import ConfigError
from hf_speculate.models.inferencer import Inferencer
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.processors.row_groups import ProcessorGroups
from hf_speculate.types import DraftOut


class ModelDrafter(Drafter):
    """A `Drafter` over a draft model: K forwards a round, no nested `generate()`.

    The row-wise logits processors are applied to the draft's logits, so that its distribution is near the target's.
    Each draft starts with new forks of those that have state.
    """

    def __init__(
        self,
        inferencer: Inferencer,
        processors: BlockLogitsProcessorList | ProcessorGroups | None = None,
        settings: DraftSettings | None = None,
    ):
        self.inferencer = inferencer
        self.settings = settings or DraftSettings()
        processors = BlockLogitsProcessorList() if processors is None else processors
        self.chooser = TokenChooser(processors, self.settings, inferencer.language_model.device)
        self.can_join, self.reads_kept = self.chooser.can_join, self.chooser.reads_kept

    @property
    def draft_model(self) -> PreTrainedModel:
        """The model whose states `kv_cache` holds."""
        return self.inferencer.language_model.model

    def draft(self, request: DraftRequest) -> DraftOut:
        """See `Drafter.draft`; `kv_cache` is required."""
        request.check()
        query, kv_cache, num_draft_tokens, sample_strategy, keys, kept = request
        if kv_cache is None:
            raise ConfigError("kv_cache must be given to a draft model, got None; pass a KVCache")
        self.chooser.read(query, kept)
        draft = self.chooser.start(num_draft_tokens, sample_strategy, keys)
        self.inferencer.extend(query.to(self.inferencer.language_model.device), kv_cache, num_draft_tokens, draft)
        return draft.finish(query.device)

    def begin(self, token_ids: Tensor) -> None:
        self.chooser.begin(token_ids)

    def read(self, token_ids: Tensor, kv_cache: KVCache) -> None:
        self.inferencer.feed(token_ids.to(self.inferencer.language_model.device), kv_cache)

    def join(self, other: "ModelDrafter") -> None:
        self.inferencer.language_model.join(other.inferencer.language_model)
        self.chooser.join(other.chooser)

    def rows(self, indices: Sequence[int]) -> None:
        self.inferencer.language_model.extra_inputs.rows(indices)
        self.chooser.rows(indices)
