"""The suffix drafter: prompt lookup that drafts what followed the longest match of a row's last tokens."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from hf_speculate.draft.base import Drafter, DraftRequest
from hf_speculate.draft.suffix_index import MAX_MATCH_LEN, SuffixIndex
from hf_speculate.draft.suffix_store import Proposal, StoreReader, SuffixStore
from hf_speculate.transfers import upload
from hf_speculate.types import DraftOut, Kept


@dataclass(frozen=True)
class SuffixSettings:
    """How rows are continued after a suffix match."""

    max_draft_tokens: int  # tokens a row is drafted at most, >= 1
    max_match_len: int | None = None  # longest match that is told apart; None for 64
    eos_token_ids: frozenset[int] = frozenset()  # ids after which a row needs no further token
    vocab_size: int | None = None  # V; larger ids from a store are not drafted
    store: SuffixStore | None = None  # sequences of earlier calls; None to search only the row itself
    num_pads: Sequence[int] | None = None  # [B] padding tokens before each prompt; None for none


NO_PROPOSAL = Proposal(0, [])
_HOST = torch.device("cpu")


class SuffixRow:
    """One row's tokens, and the matches of its last tokens."""

    def __init__(self, index: SuffixIndex, settings: SuffixSettings, reader: StoreReader | None):
        self.index = index
        self._settings = settings
        self._reader = reader
        if reader is not None:
            reader.follow(index.token_ids[-index.max_match_len :].tolist())

    def extend(self, token_ids: Sequence[int]) -> None:
        self.index.extend(token_ids)
        if self._reader is not None:
            self._reader.follow(token_ids)

    def propose(self, num: int) -> Proposal:
        """At most `num` tokens; the row itself is preferred to the store if both matches are equally long."""
        settings, index = self._settings, self.index
        num = min(num, settings.max_draft_tokens)
        match_len = index.match_len
        token_ids = index.continuation(index.match_end, _within(num, match_len)) if match_len else []
        found = NO_PROPOSAL if self._reader is None else self._reader.find(num)
        if found.match_len > match_len and found.token_ids:
            known = _below(found.token_ids[: _within(num, found.match_len)], settings.vocab_size)
            if known:
                match_len, token_ids = found.match_len, known
        if settings.eos_token_ids and not settings.eos_token_ids.isdisjoint(token_ids):
            end = next(at for at, token in enumerate(token_ids) if token in settings.eos_token_ids)
            token_ids = token_ids[: end + 1]
        return Proposal(match_len, token_ids) if token_ids else NO_PROPOSAL


class SuffixRows:
    """The rows' tokens on the host, updated from round to round."""

    def __init__(self, settings: SuffixSettings):
        self._settings = settings
        self._num_pads = settings.num_pads
        self.rows: list[SuffixRow] = []

    def follow(self, query_token_ids: Tensor, kept: Kept | None) -> Sequence[list[int]] | None:
        """Append new tokens; [B] those of each row, or None in the first call, whose query holds whole sequences."""
        if kept is None:
            self.begin(query_token_ids)
            return None
        counts = kept.num_emitted.tolist()
        gained = [ids[:num] for ids, num in zip(kept.token_ids.tolist(), counts, strict=True)]
        for row, ids in zip(self.rows, gained, strict=True):
            row.extend(ids)
        return gained

    def join(self, other: "SuffixRows") -> None:
        self.rows += other.rows

    def select(self, indices: Sequence[int]) -> None:
        if self._num_pads is not None:
            self._num_pads = [self._num_pads[row] for row in indices]
        if self.rows:
            self.rows = [self.rows[row] for row in indices]

    def begin(self, token_ids: Tensor) -> None:
        """Read the prompts [B, T] int64."""
        texts, settings = token_ids.tolist(), self._settings
        pads = self._num_pads or [0] * len(texts)
        most = min(settings.max_match_len or MAX_MATCH_LEN, MAX_MATCH_LEN)
        made: dict[tuple[int, ...], SuffixIndex] = {}  # rows with the same prompt share its index
        for text, num in zip(texts, pads, strict=True):
            key = tuple(text[num:])
            if key not in made:
                made[key] = SuffixIndex(most)
                made[key].extend(key)
                index = made[key]
            else:
                index = made[key].copy()
            reader = None if settings.store is None else settings.store.reader(most)
            self.rows.append(SuffixRow(index, settings, reader))
        self._num_pads = None


class SuffixDrafter(Drafter):
    """A `Drafter` that drafts the continuation of the latest of the longest earlier matches of a row's last tokens.

    Drafts are point masses. Longer matches give longer drafts. A row without a match drafts nothing, and a round in
    which no row drafts has K = 0.

    Source:
        Saxena, "Prompt lookup decoding" (2023); Oliaro et al., "SuffixDecoding" (arXiv:2411.04975).
    """

    reads_host_tokens = True
    drafts_fewer = True
    can_join = True

    def __init__(self, settings: SuffixSettings, device: torch.device | str = "cpu"):
        self.texts = SuffixRows(settings)
        self.device = torch.device(device)

    def draft(self, request: DraftRequest) -> DraftOut:
        request.check()
        gained, num_draft_tokens = self.texts.follow(request.query_token_ids, request.kept), request.num_draft_tokens
        # a row without new tokens is finished
        pairs = zip(self.texts.rows, gained or repeat(True), strict=False)
        proposals = [row.propose(num_draft_tokens).token_ids if is_live else [] for row, is_live in pairs]
        return point_masses(proposals, self.device)

    def begin(self, token_ids: Tensor) -> None:
        self.texts.begin(token_ids)

    def join(self, other: "SuffixDrafter") -> None:
        self.texts.join(other.texts)

    def rows(self, indices: Sequence[int]) -> None:
        self.texts.select(indices)


def point_masses(proposals: Sequence[list[int]], device: torch.device) -> DraftOut:
    """A draft [B, K] from lists of tokens; shorter rows are padded with token 0, which does not count."""
    lens = tuple(map(len, proposals))
    width = max(lens)
    if min(lens) < width:
        proposals = [ids + [0] * (width - len(ids)) for ids in proposals]
    if device != _HOST:  # in one copy
        rows = [[*ids, num] for ids, num in zip(proposals, lens, strict=True)]
        packed = upload(rows, device)  # [B, K+1]
        return DraftOut(packed[:, :width], packed[:, width].to(torch.int32), None, None)
    # numpy reads short lists in a third of torch.tensor()'s time
    return DraftOut(torch.from_numpy(np.array(proposals, dtype=np.int64)), _counts(lens), None, None)  # [B, K], [B]


@functools.lru_cache(maxsize=1024)  # making it takes a fifth of a draft's time; it is never written to
def _counts(lens: tuple[int, ...]) -> Tensor:
    """[B] int32."""
    return torch.tensor(lens, dtype=torch.int32, device="cpu")


def _within(num: int, match_len: int) -> int:
    """Tokens to draft after a match; drafts after short matches are soon rejected.

    On greedy sequences of the bundled target with K = 10, this rule keeps 97 % of the mean acceptance length of drafts
    that always have full length, with 69 % of their drafted tokens.
    """
    return min(num, 2 * (match_len + 1))


def _below(token_ids: list[int], vocab_size: int | None) -> list[int]:
    """The tokens before the first one that is not in the vocabulary."""
    if vocab_size is None or max(token_ids) < vocab_size:
        return token_ids
    return token_ids[: next(at for at, token in enumerate(token_ids) if token >= vocab_size)]
