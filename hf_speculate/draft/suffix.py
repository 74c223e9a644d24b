"""The suffix drafter: prompt lookup that drafts what followed the longest match of a row's last tokens."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice, takewhile

import numpy as np
import torch
from torch import Tensor

from hf_speculate.draft.acceptance_rates import SUFFIX_PRIORS, AcceptanceRates, suffix_buckets
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
# Measured on texts of SmolLM2-135M-Instruct, K = 10, at a tenth of a plain step for each verified token: 1.57 times
# plain decoding where text is copied, 1.19 for questions, 1.58 for code; full drafts reach 1.52, 1.10 and 1.50.
_LEAST_PROBABILITY = 0.15  # that a token is accepted, with all before it, for it to be drafted


class RowText:
    """A row's text, and how often the tokens after a match were emitted, by the length of the match.

    Rates are learned from every proposal, also if fewer of its tokens or none were drafted, and from the row alone:
    what a row drafts depends on its own tokens.
    """

    def __init__(self) -> None:
        self.index, self.rates = SuffixIndex(), AcceptanceRates(SUFFIX_PRIORS)
        self.proposal = NO_PROPOSAL  # after the newest token, as it was found

    @property
    def token_ids(self) -> "array[int]":
        """All tokens of the row."""
        return self.index.token_ids

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append emitted tokens, and learn from those of the last proposal that are among them."""
        match_len, proposed = self.proposal
        agrees = [drafted == emitted for drafted, emitted in zip(proposed, token_ids, strict=False)]
        if agrees:
            num_right = agrees.index(False) if False in agrees else len(agrees)
            self.rates.observe(suffix_buckets(match_len, min(num_right + 1, len(agrees))), num_right)
        self.index.extend(token_ids)
        self.proposal = NO_PROPOSAL

    def likely(self) -> Proposal:
        """The proposal up to the first token that is not accepted often enough."""
        match_len, proposed = self.proposal
        num = self.rates.num_likely(suffix_buckets(match_len, len(proposed)), _LEAST_PROBABILITY)
        return Proposal(match_len, proposed[:num])


class SuffixDrafter(PerRow, Drafter):
    """Drafts, as point masses, the continuation of the latest of the longest earlier matches of a row's last tokens.

    A draft ends where the next token would rarely be accepted, by the row's own rates.

    Source:
        Saxena, "Prompt lookup decoding" (2023); Oliaro et al., "SuffixDecoding" (arXiv:2411.04975).
    """

    BY_ROW = ("texts", "_num_pads")
    reads_host_tokens = True
    drafts_fewer = True
    can_join = True

    def __init__(self, settings: SuffixSettings, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self.texts: list[RowText] = []  # [B], once the prompts were read
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

    def propose(self, row: RowText, num: int) -> Proposal:
        """At most `num` tokens; the row itself is preferred to the store if both matches are equally long."""
        settings, num = self._settings, min(num, self._settings.max_draft_tokens)
        last = row.token_ids[-min(settings.max_match_len or MAX_MATCH_LEN, MAX_MATCH_LEN) :]
        match_len, end = row.index.find(last)
        token_ids: list[int] = []
        if match_len:
            # A row that has begun to repeat itself continues with its period.
            token_ids = list(islice(cycle(row.token_ids[end : end + num]), num))
        proposal = NO_PROPOSAL if settings.store is None else settings.store.find(last, num)
        if proposal.match_len > match_len:
            known = list(takewhile(lambda token: token < settings.vocab_size, proposal.token_ids))
            if known:
                match_len, token_ids = proposal.match_len, known
        ends = [at for at, token in enumerate(token_ids) if token in settings.eos_token_ids]
        row.proposal = Proposal(match_len, token_ids[: ends[0] + 1] if ends else token_ids)
        return row.likely()

    def begin(self, token_ids: Tensor) -> None:
        pads = self._num_pads or [0] * len(token_ids)
        self.texts, self._num_pads = [RowText() for _ in pads], None
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
