"""The suffix drafter: prompt lookup that drafts what followed the longest match of a row's last tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice, takewhile

import numpy as np
import torch
from torch import Tensor

from hf_speculate.draft.base import Drafter, DraftRequest
from hf_speculate.draft.suffix_index import MAX_MATCH_LEN, Proposal, SuffixIndex, TextStore
from hf_speculate.per_row import PerRow
from hf_speculate.transfers import upload
from hf_speculate.types import DraftOut, Kept


@dataclass(frozen=True)
class SuffixSettings:
    """Settings of drafts after a suffix match."""

    max_draft_tokens: int  # tokens a row is drafted at most, >= 1
    max_match_len: int | None = None  # longer matches count as of that length, at most 64; None for 64
    eos_token_ids: frozenset[int] = frozenset()  # ids after which a row needs no further token
    vocab_size: float = math.inf  # V; larger ids from a store are not drafted
    store: TextStore | None = None  # sequences of earlier calls; None to search only the row itself
    num_pads: Sequence[int] | None = None  # [B] padding tokens before each prompt; None for none


NO_PROPOSAL = Proposal(0, [])


class SuffixDrafter(PerRow, Drafter):
    """Drafts, as point masses, the continuation of the latest of the longest earlier matches of a row's last tokens.

    Source:
        Saxena, "Prompt lookup decoding" (2023); Oliaro et al., "SuffixDecoding" (arXiv:2411.04975).
    """

    BY_ROW = ("texts", "_num_pads")
    reads_host_tokens = True
    drafts_fewer = True
    can_join = True

    def __init__(self, settings: SuffixSettings, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self.texts: list[SuffixIndex] = []  # [B], once the prompts were read
        self._settings = settings
        self._num_pads = settings.num_pads

    def draft(self, request: DraftRequest) -> DraftOut:
        request.check()
        gained = self.follow(request.query_token_ids, request.kept)
        rows = zip(self.texts, gained, strict=True)  # a row without new tokens is finished
        proposals = [self.propose(row, request.num_draft_tokens).token_ids if new else [] for row, new in rows]
        return point_masses(proposals, self.device)

    def is_callers(self, error: Exception) -> bool:
        return False

    def follow(self, query_token_ids: Tensor, kept: Kept | None) -> list[Sequence[int]]:
        """Append new tokens; [B] those of each row, in the first call the whole sequences, which the query holds."""
        if kept is None:
            self.begin(query_token_ids)
            return [row.token_ids for row in self.texts]
        counts = kept.num_emitted.tolist()
        gained = [ids[:num] for ids, num in zip(kept.token_ids.tolist(), counts, strict=True)]
        for row, ids in zip(self.texts, gained, strict=True):
            row.extend(ids)
        return gained

    def propose(self, row: SuffixIndex, num: int) -> Proposal:
        """At most `num` tokens; the row itself is preferred to the store if both matches are equally long."""
        settings, num = self._settings, min(num, self._settings.max_draft_tokens)
        last = row.token_ids[-min(settings.max_match_len or MAX_MATCH_LEN, MAX_MATCH_LEN) :]
        match_len, end = row.find(last)
        token_ids: list[int] = []
        if match_len:
            # A row that has begun to repeat itself continues with its period.
            num_own = _within(num, match_len)
            token_ids = list(islice(cycle(row.token_ids[end : end + num_own]), num_own))
        proposal = NO_PROPOSAL if settings.store is None else settings.store.find(last, num)
        if proposal.match_len > match_len:
            stored = proposal.token_ids[: _within(num, proposal.match_len)]
            known = list(takewhile(lambda token: token < settings.vocab_size, stored))
            if known:
                match_len, token_ids = proposal.match_len, known
        ends = [at for at, token in enumerate(token_ids) if token in settings.eos_token_ids]
        return Proposal(match_len, token_ids[: ends[0] + 1] if ends else token_ids)

    def begin(self, token_ids: Tensor) -> None:
        pads = self._num_pads or [0] * len(token_ids)
        self.texts, self._num_pads = [SuffixIndex() for _ in pads], None
        for row, ids, num in zip(self.texts, token_ids.tolist(), pads, strict=True):
            row.extend(ids[num:])


def point_masses(proposals: Sequence[list[int]], device: torch.device) -> DraftOut:
    """A draft [B, K] from lists of tokens; shorter rows are padded with token 0, which does not count."""
    lens = list(map(len, proposals))
    rows = [ids + [0] * (max(lens) - len(ids)) for ids in proposals]
    if device.type == "cpu":  # numpy reads short lists in a third of torch.tensor()'s time
        token_ids = torch.from_numpy(np.array(rows, dtype=np.int64))  # [B, K]
        return DraftOut(token_ids, torch.from_numpy(np.array(lens, dtype=np.int32)), None, None)
    packed = upload([[*ids, num] for ids, num in zip(rows, lens, strict=True)], device)  # [B, K+1], in one copy
    return DraftOut(packed[:, :-1], packed[:, -1].to(torch.int32), None, None)


def _within(num: int, match_len: int) -> int:
    """Tokens to draft after a match; drafts after short matches are soon rejected."""
    # With the bundled target and K = 10: 97 % of the mean acceptance length of full drafts, for 69 % of the tokens.
    return min(num, 2 * (match_len + 1))
