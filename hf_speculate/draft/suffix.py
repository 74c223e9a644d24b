"""Suffix drafter: prompt lookup with the longest match of a row's last tokens."""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, takewhile

import numpy as np
import torch
from torch import Tensor

from hf_speculate.draft.acceptance_rates import (
    RowRates,
    SharedRates,
    suffix_buckets,
    suffix_rates,
)
from hf_speculate.draft.base import Drafter, DraftRequest
from hf_speculate.draft.suffix_index import MAX_MATCH_LEN, Proposal, SuffixIndex, TextStore
from hf_speculate.errors import ConfigError
from hf_speculate.rows.per_row import PerRow
from hf_speculate.transfers import upload
from hf_speculate.types import CachedDraft, DraftOut


@dataclass(frozen=True)
class SuffixSettings:
    """Settings for drafting after a suffix match."""

    max_draft_tokens: int  # maximum number of tokens to draft per row, >= 1
    # longer matches count as matches of this length, at most 64; None for 64
    max_match_len: int | None = None
    eos_token_ids: frozenset[int] = frozenset()  # ids after which a row needs no further token
    vocab_size: float = math.inf  # V; ids >= V from a store are not drafted
    store: TextStore | None = None  # sequences of earlier calls; None to search only the row itself
    num_pads: Sequence[int] | None = None  # [B] padding tokens before each prompt; None for none


NO_PROPOSAL = Proposal(0, [])


class RowText:
    """Tokens and acceptance rates of a row.

    There is one rate per range of match lengths. The rates are updated with every proposal, even if
    only some or none of its tokens were drafted.

    Args:
        shared: rates shared by all rows.
        store: sequences of earlier calls; None to search only the row itself.
    """

    def __init__(self, shared: SharedRates, store: TextStore | None = None) -> None:
        self.index, self.rates, self.store = SuffixIndex(), RowRates(shared), store
        self.proposal = NO_PROPOSAL  # continuation after the newest token

    @property
    def token_ids(self) -> "array[int]":
        """All tokens of the row."""
        return self.index.token_ids

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append emitted tokens, and update the rates by comparison with the last proposal."""
        match_len, proposed = self.proposal
        agrees = [drafted == emitted for drafted, emitted in zip(proposed, token_ids, strict=False)]
        if agrees:
            num_right = agrees.index(False) if False in agrees else len(agrees)
            num_seen = min(num_right + 1, len(agrees))
            self.rates.observe(suffix_buckets(match_len, num_seen), num_right)
        self.index.extend(token_ids)
        self.proposal = NO_PROPOSAL

    def probabilities(self) -> list[float]:
        """Return each proposed token's probability of being accepted with all tokens before it."""
        match_len, proposed = self.proposal
        return self.rates.probabilities(suffix_buckets(match_len, len(proposed)))


class SuffixDrafter(PerRow, Drafter):
    """Drafter for prompt lookup and suffix matches.

    It finds the latest of the longest earlier matches, and proposes its continuation as point
    masses.

    Source:
        Saxena, "Prompt lookup decoding" (2023); Oliaro et al., "SuffixDecoding" (arXiv:2411.04975).
    """

    BY_ROW = ("texts", "_num_pads")
    reads_host_tokens = True
    reads_kept = False
    proposes = True
    is_free = True
    drafts_fewer = True
    can_join = True

    def __init__(
        self,
        settings: SuffixSettings,
        device: torch.device | str = "cpu",
        make_rates: Callable[[], SharedRates] = suffix_rates,
    ):
        self.device = torch.device(device)
        self.texts: list[RowText] = []  # [B]; empty until the prompts have been read
        self._settings = settings
        self._num_pads = settings.num_pads
        self._make_rates = make_rates  # called once per row

    def begin(self, token_ids: Tensor) -> None:
        pads = self._num_pads or [0] * len(token_ids)
        prompts, store = (
            [ids[num_pads:] for ids, num_pads in zip(token_ids.tolist(), pads, strict=True)],
            self._settings.store,
        )
        self.texts, self._num_pads = [], None
        for prompt in prompts:
            self.texts.append(
                RowText(self._make_rates(), None if store is None else store.of_prompt(prompt))
            )
            self.texts[-1].extend(prompt)

    def look_up(self, new_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        for row, ids in zip(self.texts, new_ids, strict=True):
            row.extend(ids)
            row.proposal = self._find(row) if ids else NO_PROPOSAL  # a finished row gets no tokens
        return [row.probabilities() for row in self.texts]

    def cut_proposal(self, num_draft_tokens: int) -> DraftOut:
        proposals = [row.proposal.token_ids[:num_draft_tokens] for row in self.texts]
        return point_masses(proposals, self.device)

    def draft(self, request: DraftRequest) -> DraftOut:
        request.check()
        return self.cut_proposal(request.num_draft_tokens)

    def is_callers(self, error: Exception) -> bool:
        return isinstance(error, ConfigError)  # raised if the user's key function of a store fails

    def _find(self, row: RowText) -> Proposal:
        """Return the tokens after the longest match in the row, or in the store if it is longer."""
        settings, num_tokens = self._settings, self._settings.max_draft_tokens
        last = row.token_ids[-min(settings.max_match_len or MAX_MATCH_LEN, MAX_MATCH_LEN) :]
        match_len, end = row.index.find(last)
        token_ids: list[int] = []
        if match_len:
            # A row that repeats itself continues with its period.
            period = row.token_ids[end : end + num_tokens]
            token_ids = list(islice(cycle(period), num_tokens))
        if row.store is not None:
            proposal = row.store.find(last, num_tokens)
            if proposal.match_len > match_len:
                known = takewhile(lambda token: token < settings.vocab_size, proposal.token_ids)
                if known_ids := list(known):
                    match_len, token_ids = proposal.match_len, known_ids
        ends = [at for at, token in enumerate(token_ids) if token in settings.eos_token_ids]
        return Proposal(match_len, token_ids[: ends[0] + 1] if ends else token_ids)


def not_fed(query_token_ids: Tensor) -> CachedDraft:
    """Return the state of a draft cache after skipping a query [B, Q]."""
    num_rows, num_query = query_token_ids.shape
    return CachedDraft(-num_query, [False] * num_rows)


def point_masses(proposals: Sequence[list[int]], device: torch.device) -> DraftOut:
    """Make a draft [B, K] from lists of tokens.

    Shorter rows are padded with token 0, which `lens` does not count.
    """
    lens = list(map(len, proposals))
    rows = [ids + [0] * (max(lens) - len(ids)) for ids in proposals]
    if device.type == "cpu":  # numpy reads short lists in a third of torch.tensor()'s time
        token_ids = torch.from_numpy(np.array(rows, dtype=np.int64))  # [B, K]
        return DraftOut(token_ids, torch.from_numpy(np.array(lens, dtype=np.int32)), None, None)
    # [B, K+1], uploaded in one copy
    packed = upload([[*ids, length] for ids, length in zip(rows, lens, strict=True)], device)
    return DraftOut(packed[:, :-1], packed[:, -1].to(torch.int32), None, None)
