"""Draft source for a user's own drafter, whose drafts are checked in every round."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.draft.base import Drafter, DrafterFactory, DrafterSetup, DraftRequest
from hf_speculate.draft.source import (
    VARIANTS,
    DraftSource,
    FactorySource,
    HistoryKey,
    hint_of,
    load_entry,
    qualified_name,
)
from hf_speculate.errors import ConfigError, ShapeError
from hf_speculate.field_checks import Check, integer
from hf_speculate.rows.per_row import PerRow
from hf_speculate.types import DraftOut, SampleStrategy

_POSITIVE = integer("an int of at least 1", 1, math.inf, "leave it out for any number")
_LAYERS = Check(
    "be one or more ints",
    lambda layers: layers and all(type(layer) is int for layer in layers),
    "leave it out for none",
)

_FLAGS = [
    "reads_host_tokens",
    "reads_kept",
    "reads_prompt",
    "is_compiled",
    "counts_padding",
    "shares_columns",
]
_FLAGS += ["drafts_past_context", "proposes", "is_free"]


class CustomDrafter(PerRow, Drafter):
    """A `Drafter` that wraps a user's drafter.

    Its optional attributes get default values, and its drafts are checked.

    Raises:
        ConfigError: the factory returned no drafter, or an attribute is out of range.
        ShapeError: raised by `draft` if a draft does not have the shapes, dtypes or device of a
            `DraftOut`.
    """

    PARTS = ("drafter",)
    drafts_fewer = True

    def __init__(self, factory: DrafterFactory, setup: DrafterSetup):
        drafter: Any = factory(setup)
        if isinstance(drafter, type) or not all(
            callable(getattr(drafter, name, None)) for name in ("draft", "rows")
        ):
            raise ConfigError(
                f"drafter must make an object with draft() and rows(), got {_name(drafter)}; "
                "return an instance of a class that fulfils hf_speculate.Drafter"
            )
        max_tokens = getattr(drafter, "max_draft_tokens", None)
        if max_tokens is not None:
            _POSITIVE("max_draft_tokens of a drafter", max_tokens)
        layers = getattr(drafter, "hidden_layers", None)
        if layers is not None:
            _LAYERS("hidden_layers of a drafter", layers)
        self.drafter = drafter
        self.hidden_layers = None if layers is None else list(layers)
        self.max_draft_tokens = max_tokens
        for name in _FLAGS:
            setattr(self, name, bool(getattr(drafter, name, getattr(Drafter, name))))
        context_len = getattr(drafter, "context_len", None)
        if context_len is not None:
            _POSITIVE("context_len of a drafter", context_len)
        self.context_len = context_len
        self._device = setup.device
        self._vocab_size = setup.vocab_size
        self._num_rows = setup.batch_size  # number of rows at the last look-up
        # whether the next call is the first one, whose query is the whole sequence
        self._hides_kept = False

    def begin(self, token_ids: Tensor) -> None:
        if self.proposes:
            self.drafter.begin(token_ids)
        self._hides_kept = not self.proposes and self.hidden_layers is None

    def look_up(self, new_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        probabilities: list[list[float]] = self.drafter.look_up(new_ids)
        if len(probabilities) != len(new_ids):
            raise ShapeError(
                f"look_up of a drafter must return a list for each of {len(new_ids)} rows, got "
                f"{len(probabilities)}; "
                "return an empty list for a row without a proposal"
            )
        self._num_rows = len(new_ids)
        return probabilities

    def rows(self, indices: Sequence[int]) -> None:
        super().rows(indices)
        self._num_rows = len(indices)

    def cut_proposal(self, num_draft_tokens: int) -> DraftOut:
        draft = self.drafter.cut_proposal(num_draft_tokens)
        self._check(draft, self._num_rows, num_draft_tokens)
        return self._valid(draft)._replace(token_logits=None, logsumexp=None)

    def draft(self, request: DraftRequest) -> DraftOut:
        """Draft with the user's drafter, and replace ids outside the vocabulary with -1.

        No verifier accepts -1.
        """
        request.check()
        if self._hides_kept:
            request, self._hides_kept = request._replace(kept=None), False
        # the drafter may keep the tokens, but a graph of the target overwrites them
        request = request._replace(query_token_ids=request.query_token_ids.clone())
        draft = self.drafter.draft(request)
        self._check(draft, request.query_token_ids.shape[0], request.num_draft_tokens)
        draft, logits, logsumexp = self._valid(draft), draft.token_logits, draft.logsumexp
        if request.sample_strategy is SampleStrategy.GREEDY or logits is None:
            return draft._replace(token_logits=None, logsumexp=None)
        # The drafter may reuse its memory, and graphs take the same tensor for the same numbers.
        logsumexp = logits.float().logsumexp(-1) if logsumexp is None else logsumexp[:]
        return draft._replace(token_logits=logits[:], logsumexp=logsumexp)

    def _valid(self, draft: DraftOut) -> DraftOut:
        """Replace ids outside the vocabulary with -1, and mark the draft as not cached."""
        ids = draft.token_ids
        ids = ids.masked_fill((ids < 0) | (ids >= self._vocab_size), -1)
        lens = draft.lens.to(torch.int32).clamp(0, ids.shape[1])
        return draft._replace(token_ids=ids, lens=lens, cached=None)

    def is_callers(self, error: Exception) -> bool:
        decides = getattr(self.drafter, "is_callers", super().is_callers)
        return bool(decides(error))

    def has_numbers(self) -> Tensor | None:
        look = getattr(self.drafter, "has_numbers", super().has_numbers)
        numbers: Tensor | None = look()
        return numbers

    def project_states(self, states: Tensor) -> Tensor:
        project = getattr(self.drafter, "project_states", super().project_states)
        projected: Tensor = project(states)
        return projected

    def _check(self, draft: DraftOut, num_rows: int, num_draft_tokens: int) -> None:
        if not isinstance(draft, DraftOut):
            raise ShapeError(
                f"a drafter must return a DraftOut, got {_name(draft)}; see hf_speculate.types"
            )
        ids = draft.token_ids
        if (
            ids.ndim != 2
            or ids.shape[0] != num_rows
            or ids.shape[1] > num_draft_tokens
            or ids.dtype != torch.int64
        ):
            raise ShapeError(
                f"token_ids of a draft must be [B, K] int64 with B = {num_rows} and K of at most "
                f"{num_draft_tokens}, "
                f"got {list(ids.shape)} {_dtype(ids)}; return fewer tokens where no more are "
                "known, never more"
            )
        if tuple(draft.lens.shape) != (num_rows,) or draft.lens.dtype not in (
            torch.int32,
            torch.int64,
        ):
            raise ShapeError(
                f"lens of a draft must be [B] int32 with B = {num_rows}, got "
                f"{list(draft.lens.shape)} "
                f"{_dtype(draft.lens)}; say how many tokens of each row count"
            )
        if ids.device != self._device:
            raise ShapeError(
                f"token_ids of a draft must be on {self._device}, as in its setup, got {ids.device}"
            )
        shape = [*ids.shape, self._vocab_size]
        if draft.token_logits is not None and list(draft.token_logits.shape) != shape:
            raise ShapeError(
                f"token_logits of a draft must be [B, K, V] = {shape}, got "
                f"{list(draft.token_logits.shape)}; "
                "return None for a point mass"
            )


class CustomSource(FactorySource):
    """Draft source for calls with a user's own drafter."""

    argument = "drafter"
    hint = hint_of(argument)
    unsynced = argument

    def __init__(self, factory: DrafterFactory):
        self.factory = factory

    @property
    def description(self) -> str:  # type: ignore[override]
        return getattr(self.factory, "description", None) or "custom drafter"

    def start(self, setup: DrafterSetup) -> Drafter:
        return CustomDrafter(self.factory, setup)

    def history_key(self) -> HistoryKey:
        name = getattr(self.factory, "description", None) or qualified_name(self.factory)
        return HistoryKey(None, (f"drafter {name}", False))

    def step_bytes(self, target: PreTrainedModel) -> int | None:
        return None


def make_source(target: PreTrainedModel, values: Mapping[str, Any]) -> DraftSource:
    """Make the draft source for `drafter`; a factory may name another source, as draft heads do."""
    factory = values["drafter"]
    variant = getattr(factory, "draft_source", None)
    source: DraftSource = (
        CustomSource(factory) if variant is None else load_entry(VARIANTS[variant])(target, values)
    )
    return source


def _name(result: object) -> str:
    return result.__name__ if isinstance(result, type) else type(result).__name__


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
