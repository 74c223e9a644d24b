"""The model drafter: drafts with a smaller model, eagerly or with compiled steps."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.cache.base import KVCache
from hf_speculate.cache.preallocated import LayerKinds
from hf_speculate.draft.base import Drafter, DraftRequest
from hf_speculate.draft.token_choice import DraftSettings, RoundDraft, TokenChooser, choose_step
from hf_speculate.draft.vocab_mapping import DraftVocabulary, TranslatedLanguageModel
from hf_speculate.errors import ConfigError
from hf_speculate.models.compiled import CompiledLanguageModel, Rows, States, forward_rows
from hf_speculate.models.context import Context
from hf_speculate.models.inferencer import Chosen, Inferencer
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.per_row import PerRow
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.processors.of_rows import RowProcessors
from hf_speculate.types import DraftOut, NoiseKeys


class ModelDrafter(PerRow, Drafter):
    """A `Drafter` over a draft model, whose distribution the row-wise processors bring near the target's."""

    PARTS = ("language_model", "chooser")

    def __init__(
        self,
        inferencer: Inferencer,
        processors: RowProcessors | None = None,
        settings: DraftSettings | None = None,
        context: Context | None = None,  # of the draft model, if rows may be longer
        vocabulary: DraftVocabulary | None = None,  # of the logits' columns
    ):
        self.inferencer, self.language_model = inferencer, inferencer.language_model
        self.settings = settings or DraftSettings()
        processors = BlockLogitsProcessorList() if processors is None else processors
        vocabulary = vocabulary or DraftVocabulary()
        self.chooser = TokenChooser(processors, self.settings, self.language_model.device, vocabulary)
        self.can_join, self.reads_kept = self.chooser.can_join, self.chooser.reads_kept
        self.draft_model: PreTrainedModel = self.language_model.model  # whose states `kv_cache` holds
        if context is not None:
            self.context_len, self.counts_padding, self.shares_columns = context

    def draft(self, request: DraftRequest) -> DraftOut:
        request.check()
        query, kv_cache, num_draft_tokens, sample_strategy, keys, kept = request
        if kv_cache is None:
            raise ConfigError("kv_cache must be given to a draft model, got None; pass a KVCache")
        self.chooser.read(query, kept)
        draft = self.chooser.start(num_draft_tokens, sample_strategy, keys)
        self._extend(self._sent(query), kv_cache, num_draft_tokens, draft)
        return draft.finish(self._out_device(query))

    def _extend(self, query: Tensor, kv_cache: KVCache, num_draft_tokens: int, draft: RoundDraft) -> None:
        self.inferencer.extend(query, kv_cache, num_draft_tokens, draft)

    def is_callers(self, error: Exception) -> bool:
        return error is self.chooser.processor_error

    def has_numbers(self) -> Tensor | None:
        return self.chooser.has_numbers()

    def begin(self, token_ids: Tensor) -> None:
        self.chooser.begin(token_ids)

    def read(self, token_ids: Tensor, kv_cache: KVCache) -> None:
        self.inferencer.feed(self._sent(token_ids), kv_cache)

    def _sent(self, token_ids: Tensor) -> Tensor:
        """Token ids where the language model expects them."""
        return token_ids.to(self.language_model.device)

    def _out_device(self, query: Tensor) -> torch.device:
        """Where drafts are expected."""
        return query.device


class TranslatedDrafter(ModelDrafter):
    """A `ModelDrafter` whose model has another vocabulary; it reads the text on the host if it must encode tokens."""

    def __init__(
        self,
        inferencer: Inferencer,
        language_model: TranslatedLanguageModel,  # the one of the inferencer
        processors: RowProcessors,
        settings: DraftSettings,
        context: Context | None,
        device: torch.device,  # where drafts are expected
    ):
        super().__init__(inferencer, processors, settings, context, language_model.vocabulary)
        self.reads_host_tokens, self._device = language_model.encodes, device

    def _sent(self, token_ids: Tensor) -> Tensor:
        return token_ids if self.reads_host_tokens else super()._sent(token_ids)

    def _out_device(self, query: Tensor) -> torch.device:
        return self._device


# A step reads the two newest tokens, so that the first one needs no shape of its own: the drafter may not have seen the
# last but one. For the others its states are written again.
STEP_QUERY_LEN = 2


class Carry(NamedTuple):
    """What a step changes for the next one."""

    query: Tensor  # [B, 2] int64, the newest tokens
    ends: Tensor  # [B] int64, the column of the first of them
    keys: NoiseKeys | None  # of the next token's noise; None to take the argmax


def draft_step(
    model: PreTrainedModel, carry: Carry, rows: Rows, states: States, kinds: LayerKinds, settings: DraftSettings
) -> tuple[Chosen, Carry]:
    """Choose one token per row; the cache's buffers `states` are written to."""
    query, ends, keys = carry
    logits = forward_rows(model, query, ends, rows, states, kinds).logits[:, -1]  # [B, V]
    chosen = choose_step(logits, keys, settings)
    if keys is not None:
        keys = keys._replace(positions=keys.positions + 1)
    return chosen, Carry(torch.cat([query[:, 1:], chosen.token_ids], dim=1), ends + 1, keys)


class CompiledDrafter(ModelDrafter):
    """A `ModelDrafter` whose steps run compiled; with processors or a confidence threshold, only their forwards do."""

    min_query_len = STEP_QUERY_LEN
    language_model: CompiledLanguageModel

    def _extend(self, query: Tensor, kv_cache: KVCache, num_draft_tokens: int, draft: RoundDraft) -> None:
        steps = None
        if self.chooser.is_plain:
            query = self._catch_up(query, kv_cache)
            steps = self._steps(query, kv_cache, num_draft_tokens, draft.keys)
        if steps is None:
            super()._extend(query, kv_cache, num_draft_tokens, draft)
        else:
            kv_cache.advance(query.shape[1] + num_draft_tokens - 1)
            draft.chosen += steps
            logits = steps[-1].token_logits
            self.chooser.last_logits = None if logits is None else logits[:, -1]

    def _catch_up(self, query: Tensor, kv_cache: KVCache) -> Tensor:
        """Feed a query that is longer than a step's, such as the prompt; returns what is left to feed, [B, Q]."""
        if query.shape[1] < STEP_QUERY_LEN or (query.shape[1] == STEP_QUERY_LEN and kv_cache.num_columns):
            return query
        ahead, model = query[:, :-1], self.language_model
        if ahead.shape[1] <= STEP_QUERY_LEN and model.runner.varies:  # after plain steps
            LanguageModel.run(model, ahead, kv_cache, logits_to_keep=1)  # compiled, it would be one more graph
        else:
            self.inferencer.feed(ahead, kv_cache)
        kv_cache.crop(1)  # it is fed again: a prompt may be a single token
        return query[:, -STEP_QUERY_LEN:]

    def _steps(self, query: Tensor, kv_cache: KVCache, num_steps: int, keys: NoiseKeys | None) -> list[Chosen] | None:
        buffers = self.language_model.buffers(kv_cache)
        if buffers is None or query.shape[1] != STEP_QUERY_LEN:
            return None
        runner = self.language_model.runner
        if keys is not None:
            keys = NoiseKeys(*(buffers.vary(part, 0) for part in keys))
        backend = runner.sampling_backend or self.settings.backend
        settings = self.settings._replace(eos_token_ids=None, backend=backend)  # steps do not end rows
        name = f"draft step, {'greedy' if keys is None else settings}"
        ends, *constant = buffers.arguments(STEP_QUERY_LEN + num_steps - 1)
        query = query.clone(memory_format=torch.contiguous_format)  # other strides would be compiled again
        carry = Carry(buffers.vary(query, 0), ends, keys)
        return runner.repeat(name, draft_step, num_steps, carry, *constant, settings)
