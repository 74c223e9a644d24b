"""One round of a draft head, which reads the emitted tokens and proposes new tokens."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from hf_speculate.draft.base import Drafter, DrafterSetup, DraftRequest
from hf_speculate.draft.token_choice import DraftSettings, RoundDraft, TokenChooser
from hf_speculate.errors import ShapeError
from hf_speculate.options.heads.head import HeadSpec
from hf_speculate.options.heads.network import HeadNetwork, TargetParts
from hf_speculate.options.heads.row_cache import RowCache, fill_absent
from hf_speculate.rows.per_row import PerRow
from hf_speculate.types import DraftOut, Kept, NoiseKeys

if TYPE_CHECKING:
    from hf_speculate.engine.runners import Runners

_CHUNK_SIZE = 512  # tokens per row and forward; bounds the mask size for long prompts


class MergedEmbeddings(NamedTuple):
    """The target's image and audio embeddings."""

    embeddings: Tensor  # [B, N, Ht], input of the target's first layer
    is_media: Tensor  # [B, N, 1] bool, whether to replace each token's embedding

    def merge(self, embeddings: Tensor) -> Tensor:
        """Replace embeddings [B, N, Ht] of placeholder tokens with image and audio embeddings."""
        return torch.where(self.is_media, self.embeddings, embeddings)


class NewTokens(NamedTuple):
    """Tokens since the last round, left-aligned."""

    token_ids: Tensor  # [B, N] int64; any valid id after a row's last token
    states: Tensor | None  # [B, N, D], states of the previous tokens; 0 after a row's last
    counts: list[int]  # [B] number of tokens of each row
    lens: Tensor  # [B] int64, the counts on the head's device
    newest_ids: Tensor  # [B] int64, the newest token of each row
    merged: MergedEmbeddings | None = None  # None if the network reads only token embeddings

    @property
    def width(self) -> int:
        return self.token_ids.shape[1]

    def chunks(self) -> Iterator["NewTokens"]:
        """Split into chunks of at most `_CHUNK_SIZE` columns; yield at least one."""
        for start in range(0, max(self.width, 1), _CHUNK_SIZE):
            columns = slice(start, start + _CHUNK_SIZE)
            states = None if self.states is None else self.states[:, columns]
            counts = [min(max(count - start, 0), _CHUNK_SIZE) for count in self.counts]
            lens = (self.lens - start).clamp(0, _CHUNK_SIZE)
            merged = (
                None
                if self.merged is None
                else MergedEmbeddings(*(tensor[:, columns] for tensor in self.merged))
            )
            yield NewTokens(
                self.token_ids[:, columns], states, counts, lens, self.newest_ids, merged
            )


NetworkT = TypeVar("NetworkT", bound=HeadNetwork)


class HeadDrafter(PerRow, Drafter, ABC, Generic[NetworkT]):
    """A `Drafter` that runs a head's network.

    Its cache holds B rows of different lengths.
    """

    drafts_fewer = True
    can_capture: bool = False
    """Whether it can draft from device graphs in this call."""
    BY_ROW = ("_num_pads",)
    TENSORS = ("newest_outputs",)
    PARTS: ClassVar[tuple[str, ...]] = ("cache", "chooser")

    def __init__(self, network: NetworkT, spec: HeadSpec, setup: DrafterSetup):
        weight = next(network.parameters())
        self.device, self.dtype = device, dtype = weight.device, weight.dtype
        self.network = network
        self.hidden_layers = spec.hidden_layers or None
        self.max_draft_tokens = spec.max_draft_tokens
        context_len = spec.max_position_embeddings
        is_reached = context_len is not None and (
            context_len < setup.max_length or setup.processors.can_join
        )
        self.context_len = context_len if is_reached else None  # joining rows may be longer
        self.parts = TargetParts(setup.target, network.vocabulary, device, dtype)
        eos = (
            torch.tensor(sorted(setup.eos_token_ids), device=device)
            if setup.eos_token_ids
            else None
        )
        settings = DraftSettings(
            eos, setup.confidence_threshold, setup.keeps_logits, setup.stream, setup.backend
        )
        self.chooser = TokenChooser(setup.processors, settings, device, self.parts.vocabulary)
        self.cache = RowCache(network.layer_masks, setup.batch_size, weight)
        self._tokens_device = setup.device
        self._num_pads = list(setup.num_pads)
        # outputs [B, H] at the newest tokens, by depth
        self.newest_outputs: dict[int, Tensor] = {}

    @property
    def can_join(self) -> bool:  # type: ignore[override]
        return self.chooser.can_join

    def is_callers(self, error: Exception) -> bool:
        return error is self.chooser.processor_error

    def has_numbers(self) -> Tensor | None:
        return self.chooser.has_numbers()

    def project_states(self, states: Tensor) -> Tensor:
        """Project the target's concatenated states [B, N, A * Ht] to the head's [B, N, D]."""
        return self.network.project(states.to(self.device, self.dtype))

    def begin(self, token_ids: Tensor) -> None:
        self.chooser.begin(token_ids)
        if not self.hidden_layers:
            self._read_chunks(self._new_tokens(token_ids, None))

    def read_kept(self, kept: Kept) -> None:
        self._read_chunks(self._new_tokens(kept.token_ids, kept))

    def join(self, other: "HeadDrafter[NetworkT]") -> None:
        fill_absent(
            self.newest_outputs, other.newest_outputs, len(self._num_pads), len(other._num_pads)
        )
        super().join(other)

    @torch.no_grad()
    def _read_chunks(self, new: NewTokens) -> None:
        for chunk in new.chunks():
            self.read_new(chunk)

    @abstractmethod
    def read_new(self, new: NewTokens) -> None:
        """Write new tokens to the cache without drafting."""

    @abstractmethod
    def propose(self, new: NewTokens, num_draft_tokens: int, draft: RoundDraft) -> Tensor | None:
        """Read the new tokens and add up to K draft tokens to every row.

        Return the draft lengths [B] int, or None if all tokens count.
        """

    def capture(self, setup: DrafterSetup, runners: "Runners") -> None:
        """Draft from device graphs if the target does and the drafter can."""

    def draft_captured(
        self, kept: Kept | None, num_draft_tokens: int, keys: NoiseKeys | None
    ) -> DraftOut | None:
        """Read the emitted tokens and draft K tokens from a device graph.

        Return None, without reading any token, if the round must be drafted eagerly.
        """
        return None

    @torch.no_grad()
    def draft(self, request: DraftRequest) -> DraftOut:
        request.check()
        query, kept = request.query_token_ids, request.kept
        if self.hidden_layers and (kept is None or kept.hidden_states is None):
            raise ShapeError(
                "kept must hold hidden states for a draft head, got none; pass the emitted tokens "
                "with them"
            )
        num_draft_tokens = min(
            request.num_draft_tokens, self.max_draft_tokens or request.num_draft_tokens
        )
        self.chooser.read(query, kept)
        draft = self.chooser.start(num_draft_tokens, request.sample_strategy, request.keys)
        captured = self.draft_captured(kept, num_draft_tokens, draft.keys)
        if captured is not None:
            return captured
        draft_lens = self.propose(self._new_tokens(query, kept), num_draft_tokens, draft)
        return draft.finish(self._tokens_device, draft_lens)

    def _new_tokens(self, query: Tensor, kept: Kept | None) -> NewTokens:
        newest = query[:, -1].to(self.device)
        if kept is None:  # first round of a head without states, which reads whole sequences
            counts = [query.shape[1] - num_pads for num_pads in self._num_pads]
            lens = torch.tensor(counts, device=self.device)
            columns = (
                torch.arange(max(counts), device=self.device) + (query.shape[1] - lens)[:, None]
            )
            ids = query.to(self.device).gather(1, columns.clamp_max(query.shape[1] - 1))  # [B, N]
            return NewTokens(ids, None, counts, lens, newest)
        ids, counts = kept.token_ids.clamp_min(0).to(self.device), kept.num_emitted.tolist()
        lens = kept.num_emitted.to(self.device, torch.int64)
        states = (
            None if kept.hidden_states is None else kept.hidden_states.to(self.device, self.dtype)
        )
        if states is not None and min(counts) < ids.shape[1]:
            is_behind = torch.arange(ids.shape[1], device=self.device) >= lens[:, None]  # [B, N]
            states = states.masked_fill(is_behind[:, :, None], 0)  # they may be NaN
        return NewTokens(ids, states, counts, lens, newest)


def last_of(outputs: Tensor, new: NewTokens, before: Tensor | None = None) -> Tensor:
    """Return the outputs [B, H] at each row's last new token, from outputs [B, N, H].

    Rows without new tokens get their row of `before`.
    """
    if min(new.counts) == max(new.counts) > 0:
        return outputs[:, new.counts[0] - 1]
    return last_by_lens(outputs, new.lens, before)


def last_by_lens(outputs: Tensor, lens: Tensor, before: Tensor | None = None) -> Tensor:
    """Return the result of `last_of` for `lens` [B] new tokens per row, without a host read."""
    index = (lens - 1).clamp_min(0)[:, None, None].expand(-1, 1, outputs.shape[2])
    last = outputs.gather(1, index)[:, 0]
    return torch.where((lens > 0)[:, None], last, last.new_zeros(()) if before is None else before)
