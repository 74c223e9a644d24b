"""Drafts what followed the text's end where it stood before, without a model."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_speculate.cache.base import KVCache
from hf_speculate.draft.base import check_request
from hf_speculate.draft.suffix_index import MAX_MATCH_LEN, SuffixIndex
from hf_speculate.draft.suffix_store import StoreReader, SuffixStore
from hf_speculate.types import DraftOut, Kept, NoiseKeys, SampleStrategy


@dataclass(frozen=True)
class SuffixSettings:
    """How texts are continued from what stood before.

    Args:
        max_draft_tokens: tokens a row is drafted at most, >= 1.
        max_match_len: matches of more tokens count as of that many; None: 64.
        eos_token_ids: ids after which a row needs no further token.
        vocab_size: V; ids from a store that are not below it are not drafted.
        store: texts of earlier calls; None: only the row's own text is searched.
        num_pads: [B] tokens of padding before each prompt; None: none.
    """

    max_draft_tokens: int
    max_match_len: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    vocab_size: int | None = None
    store: SuffixStore | None = None
    num_pads: Sequence[int] | None = None


class Proposal(NamedTuple):
    """What one row could be continued with."""

    token_ids: list[int]
    match_len: int  # tokens of the row's end that stood before


NO_PROPOSAL = Proposal([], 0)
_HOST = torch.device("cpu")


class SuffixRow:
    """One row's text, and where its end stood before.

    Args:
        index: holds the prompt, and is this row's own from here on.
        settings: see `SuffixSettings`.
        reader: the row's place in the store; None: there is none.
    """

    def __init__(self, index: SuffixIndex, settings: SuffixSettings, reader: StoreReader | None):
        self.index = index
        self._settings = settings
        self._reader = reader
        if reader is not None:
            reader.follow(index.text[-index.max_match_len :].tolist())

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        self.index.extend(token_ids)
        if self._reader is not None:
            self._reader.follow(token_ids)

    def propose(self, num: int) -> Proposal:
        """At most `num` tokens; the row's own text is preferred to the store's where matches are as long."""
        settings, index = self._settings, self.index
        num = min(num, settings.max_draft_tokens)
        match_len = index.match_len
        token_ids = index.continuation(index.match_end, _within(num, match_len)) if match_len else []
        if self._reader is not None:
            found = self._reader.find(num)
            if found.match_len > match_len and found.token_ids:
                known = _below(found.token_ids[: _within(num, found.match_len)], settings.vocab_size)
                if known:
                    match_len, token_ids = found.match_len, known
        if settings.eos_token_ids and not settings.eos_token_ids.isdisjoint(token_ids):
            end = next(place for place, token in enumerate(token_ids) if token in settings.eos_token_ids)
            token_ids = token_ids[: end + 1]
        return Proposal(token_ids, match_len) if token_ids else NO_PROPOSAL


class SuffixRows:
    """The rows' texts on the host, kept up to date from round to round.

    Args:
        settings: see `SuffixSettings`.
    """

    def __init__(self, settings: SuffixSettings):
        self._settings = settings
        self._num_pads = settings.num_pads
        self.rows: list[SuffixRow] = []

    def follow(self, query_token_ids: Tensor, kept: Kept | None) -> Sequence[list[int]] | None:
        """Take in what is new.

        Args:
            query_token_ids: [B, Q] int64, at the first call the whole text.
            kept: what was emitted since the last call; None in the first.

        Returns:
            [B] the tokens that each row has gained; None in the first call.
        """
        if kept is None:
            self._begin(query_token_ids.tolist())
            return None
        gained = kept.new_ids
        if gained is None:
            counts = kept.num_emitted.tolist()
            gained = [ids[:num] for ids, num in zip(kept.token_ids.tolist(), counts, strict=True)]
        for row, ids in zip(self.rows, gained, strict=True):
            row.extend(ids)
        return gained

    def select(self, indices: Sequence[int]) -> None:
        """Keep the rows `indices`, in that order. A row may end with its first token, before anything was drafted."""
        if self._num_pads is not None:
            self._num_pads = [self._num_pads[row] for row in indices]
        if self.rows:
            self.rows = [self.rows[row] for row in indices]

    def _begin(self, texts: list[list[int]]) -> None:
        settings = self._settings
        pads = self._num_pads or [0] * len(texts)
        most = min(settings.max_match_len or MAX_MATCH_LEN, MAX_MATCH_LEN)
        made: dict[tuple[int, ...], SuffixIndex] = {}  # sequences of one prompt share its work
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


class SuffixDrafter:
    """A `Drafter` that copies: a row is continued as it went on after the latest of the longest earlier matches.

    Drafts are point masses. The longer the match, the longer the draft; a row without one drafts nothing, and a round
    in which no row drafts has K = 0. Tokens are read on the host, where the caller is to hold them.

    Args:
        settings: see `SuffixSettings`.
        device: where drafts are handed over.

    Source:
        Saxena, "Prompt lookup decoding" (2023); Oliaro et al., "SuffixDecoding" (arXiv:2411.04975).
    """

    def __init__(self, settings: SuffixSettings, device: torch.device | str = "cpu"):
        self.texts = SuffixRows(settings)
        self.device = torch.device(device)

    def draft(
        self,
        query_token_ids: Tensor,
        kv_cache: KVCache | None,
        num_draft_tokens: int,
        sample_strategy: SampleStrategy,
        *,
        keys: NoiseKeys | None = None,
        kept: Kept | None = None,
    ) -> DraftOut:
        """See `Drafter.draft`; `kv_cache` is left alone, `query_token_ids` and `kept` are expected on the host."""
        check_request(query_token_ids, num_draft_tokens, sample_strategy, keys)
        gained = self.texts.follow(query_token_ids, kept)
        rows = self.texts.rows
        if gained is None or all(gained):
            proposals = [row.propose(num_draft_tokens).token_ids for row in rows]
        else:  # a row that gains nothing has ended
            pairs = zip(rows, gained, strict=True)
            proposals = [row.propose(num_draft_tokens).token_ids if ids else [] for row, ids in pairs]
        return point_masses(proposals, self.device)

    def rows(self, indices: Sequence[int]) -> None:
        """Forget all rows but `indices`."""
        self.texts.select(indices)


def point_masses(proposals: Sequence[list[int]], device: torch.device) -> DraftOut:
    """A draft of lists of tokens, as long as the longest; shorter ones are filled up with token 0."""
    lens = tuple(map(len, proposals))
    width = max(lens)
    if min(lens) < width:
        proposals = [ids + [0] * (width - len(ids)) for ids in proposals]
    # numpy reads short lists in a third of torch.tensor()'s time
    token_ids, counts = torch.from_numpy(np.array(proposals, dtype=np.int64)), _counts(lens)  # [B, K], [B]
    if device != _HOST:
        token_ids, counts = token_ids.to(device), counts.to(device)
    return DraftOut(token_ids, counts, None, None)


@functools.lru_cache(maxsize=1024)  # a fifth of a round's microseconds went into making them; nobody writes into them
def _counts(lens: tuple[int, ...]) -> Tensor:
    """[B] int32."""
    return torch.tensor(lens, dtype=torch.int32, device="cpu")


def _within(num: int, match_len: int) -> int:
    """Tokens to draft after a match: what a short one predicts soon goes wrong.

    On greedy texts of the bundled target, K = 10, this rule keeps 97 % of the tokens a round of drafts that are always
    of full length, with 69 % of their drafted tokens.
    """
    return min(num, 2 * (match_len + 1))


def _below(token_ids: list[int], vocab_size: int | None) -> list[int]:
    """The tokens up to the first that is not in the vocabulary."""
    if vocab_size is None or max(token_ids) < vocab_size:
        return token_ids
    return token_ids[: next(place for place, token in enumerate(token_ids) if token >= vocab_size)]
