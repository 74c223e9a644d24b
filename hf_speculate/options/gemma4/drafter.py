"""The drafter for a Gemma 4 assistant: one token per step, from the target's KV cache."""

import torch
from torch import Tensor

from hf_speculate.cache.masks import additive
from hf_speculate.cache.view import CacheView
from hf_speculate.draft.base import Drafter, DrafterSetup, DraftRequest
from hf_speculate.draft.token_choice import DraftSettings, TokenChooser
from hf_speculate.draft.vocab_mapping import DraftVocabulary
from hf_speculate.errors import ShapeError
from hf_speculate.models.language_model import device_of, dtype_of
from hf_speculate.options.gemma4.assistant import Context, Gemma4Assistant
from hf_speculate.rows.per_row import PerRow
from hf_speculate.transfers import upload
from hf_speculate.types import DraftOut


class Gemma4Drafter(PerRow, Drafter):
    """A `Drafter` without states of its own.

    Each round reads the states in the target's KV cache after the last rollback.
    """

    hidden_layers = (-1,)
    reads_prompt = False
    PARTS = ("chooser",)

    def __init__(self, assistant: Gemma4Assistant, setup: DrafterSetup):
        assistant.check_target(setup.target)
        self.assistant = assistant
        self.device, self.dtype = device_of(assistant.model), dtype_of(assistant.model)
        context_len = assistant.config.max_position_embeddings
        is_reached = context_len < setup.max_length or setup.processors.can_join
        self.context_len = context_len if is_reached else None  # joining rows may be longer
        eos = upload(sorted(setup.eos_token_ids), self.device) if setup.eos_token_ids else None
        settings = DraftSettings(
            eos, setup.confidence_threshold, setup.keeps_logits, setup.stream, setup.backend
        )
        vocabulary = DraftVocabulary(int(assistant.config.vocab_size)).resized(setup.vocab_size)
        self.chooser = TokenChooser(setup.processors, settings, self.device, vocabulary)
        self._embeddings, self._tokens_device = setup.target.get_input_embeddings(), setup.device
        self._layers, self._windows = assistant.sources(setup.target), assistant.windows

    @property
    def can_join(self) -> bool:  # type: ignore[override]
        return self.chooser.can_join

    def is_callers(self, error: Exception) -> bool:
        return error is self.chooser.processor_error

    def has_numbers(self) -> Tensor | None:
        return self.chooser.has_numbers()

    def begin(self, token_ids: Tensor) -> None:
        self.chooser.begin(token_ids)

    @torch.no_grad()
    def draft(self, request: DraftRequest) -> DraftOut:
        request.check()
        kept, cache = request.kept, request.target_cache
        if kept is None or kept.hidden_states is None or cache is None:
            raise ShapeError(
                "a request to a Gemma 4 assistant must hold hidden states and the target's cache, "
                "got none; pass both"
            )
        self.chooser.read(request.query_token_ids, kept)
        draft = self.chooser.start(request.num_draft_tokens, request.sample_strategy, request.keys)
        states = kept.hidden_states[:, -1].to(self.device, self.dtype)
        context, token_ids = self._context(cache), request.query_token_ids[:, -1]
        for _ in range(request.num_draft_tokens):
            logits, states = self.assistant.step(self._embedded(token_ids), states, context)
            token_ids = draft.choose(logits)
            if draft.are_enough():
                break
        return draft.finish(self._tokens_device)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """Return the target's embeddings [B, D] of ids [B] int64."""
        rows: Tensor = self._embeddings(token_ids.to(self._tokens_device))
        return rows.to(self.device, self.dtype)

    def _context(self, cache: CacheView) -> Context:
        views = {
            name: cache.layer(index, self._windows[name]) for name, index in self._layers.items()
        }
        masks = {
            name: None if view.hidden is None else additive(view.hidden, self.dtype)
            for name, view in views.items()
        }
        positions = cache.last_positions() + (1 + self.assistant.position)
        return Context(
            {name: (view.keys, view.values) for name, view in views.items()}, masks, positions
        )
