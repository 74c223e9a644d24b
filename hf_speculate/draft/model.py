"""Model drafter: draft with a smaller model, eagerly or with compiled steps."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.cache.base import KVCache
from hf_speculate.draft.base import Drafter, DraftRequest
from hf_speculate.draft.token_choice import DraftSettings, RoundDraft, TokenChooser
from hf_speculate.draft.vocab_mapping import DraftVocabulary, TranslatedLanguageModel
from hf_speculate.errors import ConfigError
from hf_speculate.models.context import Context
from hf_speculate.models.inferencer import Inferencer
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.processors.of_rows import RowProcessors
from hf_speculate.rows.per_row import PerRow
from hf_speculate.types import DraftOut


class ModelDrafter(PerRow, Drafter):
    """A `Drafter` that runs a draft model.

    The row-wise processors bring the draft distribution closer to the target's.
    """

    PARTS = ("language_model", "chooser")

    def __init__(
        self,
        inferencer: Inferencer,
        processors: RowProcessors | None = None,
        settings: DraftSettings | None = None,
        context: Context | None = None,  # the draft model's context if rows may exceed it
        vocabulary: DraftVocabulary | None = None,  # vocabulary of the logit columns
    ):
        self.inferencer, self.language_model = inferencer, inferencer.language_model
        self.settings = settings or DraftSettings()
        processors = BlockLogitsProcessorList() if processors is None else processors
        vocabulary = vocabulary or DraftVocabulary()
        self.chooser = TokenChooser(
            processors, self.settings, self.language_model.device, vocabulary
        )
        self.can_join, self.reads_kept = self.chooser.can_join, self.chooser.reads_kept
        self.awaits_prompt = self.language_model.extra_inputs.awaits_prompt
        # The model of `kv_cache`.
        self.draft_model: PreTrainedModel = self.language_model.model
        if context is not None:
            self.context_len, self.counts_padding, self.shares_columns = context

    def draft(self, request: DraftRequest) -> DraftOut:
        kv_cache, draft = self._start(request)
        query = request.query_token_ids
        self.inferencer.extend(self._sent(query), kv_cache, request.num_draft_tokens, draft)
        return draft.finish(self._out_device(query))

    def _start(self, request: DraftRequest) -> tuple[KVCache, RoundDraft]:
        """Return the draft model's cache and an empty draft for the round."""
        request.check()
        if request.kv_cache is None:
            raise ConfigError("kv_cache must be given to a draft model, got None; pass a KVCache")
        self.chooser.read(request.query_token_ids, request.kept)
        return request.kv_cache, self.chooser.start(
            request.num_draft_tokens, request.sample_strategy, request.keys
        )

    def is_callers(self, error: Exception) -> bool:
        return error is self.chooser.processor_error

    def has_numbers(self) -> Tensor | None:
        return self.chooser.has_numbers()

    def begin(self, token_ids: Tensor) -> None:
        self.chooser.begin(token_ids)

    def read(self, token_ids: Tensor, kv_cache: KVCache) -> None:
        self.inferencer.feed(self._sent(token_ids), kv_cache)

    def _sent(self, token_ids: Tensor) -> Tensor:
        """Move token ids to the device of the language model."""
        return token_ids.to(self.language_model.device)

    def _out_device(self, query: Tensor) -> torch.device:
        """Return the device for the drafts."""
        return query.device


class TranslatedDrafter(ModelDrafter):
    """A `ModelDrafter` whose model has another vocabulary.

    The drafter reads the text on the host if it must encode tokens.
    """

    def __init__(
        self,
        inferencer: Inferencer,
        language_model: TranslatedLanguageModel,  # the inferencer's language model
        processors: RowProcessors,
        settings: DraftSettings,
        context: Context | None,
        device: torch.device,  # device for the drafts
    ):
        super().__init__(inferencer, processors, settings, context, language_model.vocabulary)
        self.reads_host_tokens, self._device = language_model.encodes, device

    def _sent(self, token_ids: Tensor) -> Tensor:
        return token_ids if self.reads_host_tokens else super()._sent(token_ids)

    def _out_device(self, query: Tensor) -> torch.device:
        return self._device
