"""Verifies and trims a round: rows on their own where everything is row-wise, in lock step where it is not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.processors.stopping_criteria import StopVerdict
from hf_speculate.stats import SpeculationStats
from hf_speculate.token_buffer import TokenBuffer
from hf_speculate.types import DraftOut, NoiseKeys
from hf_speculate.verify.base import Verifier
from hf_speculate.verify.spans import Spans


class Round(NamedTuple):
    """What a judge looks at."""

    tokens: TokenBuffer  # B rows up to the newest emitted token, on the target's device
    host_tokens: TokenBuffer  # the same on the host; the same object where that is the device
    logits: Tensor  # [B, K+1, V] the target's
    draft: DraftOut
    keys: NoiseKeys


class Verified(NamedTuple):
    """A round's verdict, on the host."""

    token_ids: Tensor  # [B, N] int64 on the target's device, padded with -1
    new_ids: list[list[int]]  # [B] lists of the tokens that may be emitted
    num_drafted: list[int]  # [B] tokens that counted
    num_accepted: list[int]  # [B]
    status: int
    scores: Tensor  # [B, N, V] processed logits
    is_stopped: list[bool] | None = None  # [B] where the stopping criteria ran already


class Trimmed(NamedTuple):
    """What token-by-token decoding would have kept of a round."""

    num_emitted: list[int]  # [B]
    is_stopped: list[bool]  # [B] a stopping criterion fired at the last emitted token


class Judge(Protocol):
    """Decides a round."""

    def verify(self, round_: Round) -> Verified:
        """Which tokens the verifier keeps."""

    def trim(self, round_: Round, verified: Verified) -> Trimmed:
        """How many of them come before a stop."""

    def crop(self, num_positions: Sequence[int]) -> None:
        """Forget each row's last positions [B] of the round, which the text does not hold."""

    def rows(self, indices: Sequence[int]) -> None:
        """Forget all rows but `indices`, in that order."""


@dataclass
class RaggedJudge:
    """Every row advances by its own count: one pass over all positions, one copy to the host."""

    verifier: Verifier
    processors: BlockLogitsProcessorList
    stopping: Callable[[Tensor, Sequence[int], Sequence[int]], StopVerdict]  # as `BlockStoppingCriteria`
    stats: SpeculationStats
    spans: Spans | None = None  # what the verifier is restricted to; None: it decides everywhere

    def verify(self, round_: Round) -> Verified:
        """See `Judge.verify`."""
        tokens, draft = round_.tokens, round_.draft
        scores = round_.logits
        if len(self.processors):
            scores = self.processors(tokens.token_ids, scores, draft.token_ids, prefix_lens=tokens.lens)
        verdict = _verifier_at(round_, 0, self.verifier, self.spans).verify(scores, draft, round_.keys)
        counts = torch.stack([verdict.num_accepted, verdict.status, draft.lens.to(torch.int32)], dim=1)  # [B, 3]
        packed = torch.cat([verdict.token_ids, counts.to(torch.int64)], dim=1).tolist()  # the round's one wait
        self.stats.num_host_syncs += 1
        num_accepted = [row[-3] for row in packed]
        status = 0
        for row in packed:
            status |= row[-2]
        new_ids = [row[: num + 1] for row, num in zip(packed, num_accepted, strict=True)]
        return Verified(verdict.token_ids, new_ids, [row[-1] for row in packed], num_accepted, status, scores)

    def trim(self, round_: Round, verified: Verified) -> Trimmed:
        """See `Judge.trim`."""
        host = round_.host_tokens
        prefix_lens = host.lens
        counts = [len(ids) for ids in verified.new_ids]
        if host is round_.tokens:
            host.append(verified.token_ids, counts)
        else:
            width = max(counts)
            host.append(torch.tensor([ids + [0] * (width - len(ids)) for ids in verified.new_ids]), counts)
        stop = self.stopping(host.token_ids, prefix_lens, counts)
        host.truncate(prefix_lens)
        return Trimmed(stop.num_emitted, stop.is_done)

    def crop(self, num_positions: Sequence[int]) -> None:
        """See `Judge.crop`: processors with state take calls back."""
        self.processors.rollback(num_positions)

    def rows(self, indices: Sequence[int]) -> None:
        """See `Judge.rows`: some processors hold a number per row."""
        self.processors = self.processors.rows(indices)
        if self.spans is not None:
            self.spans.rows(indices)


@dataclass
class LockStepJudge:
    """All rows advance together: foreign processors and criteria see what plain `generate` would show them.

    They are called for all rows in their order, on equal lengths, once per new token, from left to right, never on
    a refused prefix. A round ends at the first position where a live row refuses its draft or a row finishes.

    Args:
        verifier: judges one position at a time.
        processors: the call's whole list.
        criteria: the call's whole list, as `StoppingCriteriaList`.
        pad_token_id: what finished rows go on with; None: finished rows go on decoding, as without EOS.
        records_scores: whether criteria are shown the scores so far.
        stats: counts the calls of user code.
        spans: what the verifier is restricted to; None: it decides everywhere.
    """

    verifier: Verifier
    processors: LogitsProcessorList
    criteria: Callable[[Tensor, tuple[Tensor, ...] | None], Tensor]
    pad_token_id: int | None
    records_scores: bool
    stats: SpeculationStats
    spans: Spans | None = None
    is_finished: Tensor | None = None  # [B] bool
    _scores: list[Tensor] = field(default_factory=list)  # each [B, V], one per new token

    def verify(self, round_: Round) -> Verified:
        """See `Judge.verify`; the stopping criteria run here too, between positions."""
        tokens, draft = round_.tokens, round_.draft
        batch_size, num_positions, _ = round_.logits.shape
        input_ids: Any = tokens.token_ids[:, : tokens.lens[0]]  # [B, T]; transformers wants it called a LongTensor
        was_finished = self._finished(input_ids)
        num_accepted = torch.zeros(batch_size, dtype=torch.int64, device=input_ids.device)
        status, columns, scores = 0, [], []
        for position in range(num_positions):
            step_scores = self.processors(input_ids, round_.logits[:, position].to(torch.float32, copy=True))
            verifier = _verifier_at(round_, position, self.verifier, self.spans)
            verdict = verifier.verify(*_one_position(step_scores, draft, round_.keys, position))
            next_ids = verdict.token_ids[:, 0]
            if self.pad_token_id is not None:
                next_ids = next_ids.masked_fill(was_finished, self.pad_token_id)
            input_ids = torch.cat([input_ids, next_ids[:, None]], dim=1)
            columns.append(next_ids)
            scores.append(step_scores)
            if self.records_scores:
                self._scores.append(step_scores)
            is_finished = was_finished | self.criteria(input_ids, tuple(self._scores) if self.records_scores else None)
            stays = verdict.num_accepted.bool()
            if self.pad_token_id is not None:
                stays = stays | was_finished  # their draft is the padding that they go on with
            num_accepted += verdict.num_accepted
            # rows that have ended are shown padding; without EOS they go on, and plain `generate` draws from them
            is_text = ~was_finished if self.pad_token_id is not None else torch.ones_like(was_finished)
            for flags in verdict.status[is_text].tolist():
                status |= flags
            self.stats.num_user_host_syncs += 1
            self.is_finished = is_finished
            if not bool(stays.all()) or bool((is_finished != was_finished).any()):
                break
        token_ids = torch.stack(columns, dim=1)  # [B, N]
        self.stats.num_host_syncs += len(columns) + 1
        return Verified(
            token_ids,
            token_ids.tolist(),
            draft.lens.tolist(),
            num_accepted.tolist(),
            status,
            torch.stack(scores, dim=1),
            is_finished.tolist(),
        )

    def trim(self, round_: Round, verified: Verified) -> Trimmed:
        """See `Judge.trim`; `verify` stopped at the right token already."""
        return Trimmed([len(ids) for ids in verified.new_ids], verified.is_stopped or [])

    def crop(self, num_positions: Sequence[int]) -> None:
        """Nothing to forget: no processor was shown a refused position."""

    def rows(self, indices: Sequence[int]) -> None:
        """Nothing to forget: in lock step finished rows stay."""

    def _finished(self, input_ids: Tensor) -> Tensor:
        if self.is_finished is None:
            self.is_finished = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        return self.is_finished


def _verifier_at(round_: Round, position: int, verifier: Verifier, spans: Spans | None) -> Verifier:
    """The verifier from a position of the round on, once the tokens before it were kept."""
    if spans is None:
        return verifier
    return spans.around(verifier, round_.host_tokens, round_.draft.token_ids[:, :position])


def _one_position(
    scores: Tensor, draft: DraftOut, keys: NoiseKeys, position: int
) -> tuple[Tensor, DraftOut, NoiseKeys]:
    """The verifier's arguments for one position alone: a draft of one token, or of none at the bonus position."""
    window = slice(position, position + 1)
    token_ids = draft.token_ids[:, window]
    step = DraftOut(
        token_ids,
        (draft.lens - position).clamp(0, token_ids.shape[1]),
        None if draft.token_logits is None else draft.token_logits[:, window],
        None if draft.logsumexp is None else draft.logsumexp[:, window],
    )
    # the row after the token is not scored yet; the verifier is shown this one again and its draw from it is unused
    target_logits = scores[:, None].expand(-1, token_ids.shape[1] + 1, -1)
    return target_logits, step, keys._replace(positions=keys.positions + position)
