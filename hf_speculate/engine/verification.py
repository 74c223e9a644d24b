"""Verification: run logits processors and verifier on a round, row-wise or in lock step."""

import importlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import isfinite, isnan
from operator import or_
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_speculate.config import SpeculationConfig
from hf_speculate.engine.batch import Batch
from hf_speculate.engine.plan import Plan
from hf_speculate.engine.ranks import Ranks
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.processors.of_rows import RowProcessors
from hf_speculate.processors.stopping_criteria import BlockStoppingCriteria
from hf_speculate.rows.per_row import PerRow
from hf_speculate.rows.token_buffer import TokenBuffer
from hf_speculate.transfers import download, unpack
from hf_speculate.types import (
    BAD_LOGITS,
    DeviceVerdict,
    DraftOut,
    NoiseKeys,
    Trimmed,
    Verified,
)
from hf_speculate.verify.base import Verifier, make_verifier

# imported if a lossy verifier is restricted to spans of the text
_SPANS = "hf_speculate.options.spans.spans"


class VerifierSpans(Protocol):
    """Spans of each row for a lossy verifier."""

    def around(self, lossy: Verifier, host_tokens: TokenBuffer, token_ids: Tensor) -> Verifier:
        """Return the verifier for the next positions.

        Args:
            lossy: Verifier inside the spans.
            host_tokens: Tokens of the rows.
            token_ids: [B, N], the tokens after them.
        """

    def rows(self, indices: Sequence[int]) -> None:
        """Select the rows `indices`, in this order."""


def find_spans(
    config: SpeculationConfig, do_sample: bool, num_pads: Sequence[int]
) -> VerifierSpans | None:
    """Return the spans of a call; None if its verifier is not restricted.

    Args:
        config: Settings of the call.
        do_sample: Whether the call samples.
        num_pads: [B] columns of padding before each row.
    """
    if config.relax_only_inside is None:
        return None
    spans: VerifierSpans = importlib.import_module(_SPANS).make_spans(config, do_sample, num_pads)
    return spans


@dataclass(frozen=True)
class RowWiseRule:
    """Processors and verifier for all rows and positions of a round.

    Equal rules launch the same operators. They do not read the host if `key` is not None.
    """

    key: Hashable | None  # settings of verifier and processors; None if they may read the host
    loses_nan: bool  # whether the processors get numbers in place of NaN logits
    verifier: Verifier = field(compare=False)
    processors: RowProcessors = field(compare=False)

    def __call__(
        self,
        logits: Tensor,
        draft: DraftOut,
        keys: NoiseKeys,
        token_ids: Tensor,
        lens: Sequence[int] | None = None,
    ) -> DeviceVerdict:
        """Verify a round.

        Args:
            logits: [B, K+1, V] of the target.
            draft: The drafted tokens.
            keys: Keys of the round's noise.
            token_ids: [B, C] int64, the tokens of the rows.
            lens: [B] number of tokens of each row. None for C.
        """
        scores = logits
        if self.loses_nan:  # plain `generate` shows processors no NaN of a rejected token
            scores = logits.nan_to_num(0.0, torch.inf, -torch.inf)
        if len(self.processors):
            scores = self.processors(token_ids, scores, draft.token_ids, prefix_lens=lens)
        verdict = self.verifier.verify(scores, draft, keys)
        ids = verdict.token_ids
        if self.loses_nan:
            ids = torch.cat([ids, logits.amax(-1).isnan().to(ids.dtype)], dim=1)  # [B, 2 (K+1)]
        return DeviceVerdict(verdict, scores, ids, logits)


@dataclass
class Verification(PerRow):
    """Acceptance of a round's tokens."""

    verifier: Verifier  # the verification rule
    spans: VerifierSpans | None  # spans of a lossy verifier; None without restriction
    ranks: Ranks  # the processes decoding the call together
    processors: RowProcessors  # the logits processors of each row

    @staticmethod
    def of(plan: Plan) -> "Verification":
        """Return the verification of a planned call."""
        call, config = plan.call, plan.config
        rule = (
            make_verifier(config),
            find_spans(config, call.do_sample, call.prompts.num_pads),
            call.ranks,
        )
        if not plan.is_lock_step:
            processors = call.row_lists.processors(call.processors, call.batch_size)
            return RowWiseVerification(
                *rule, processors, keeps_padding=plan.end_padding_id is not None
            )
        criteria = call.ranks.wrap_criteria(call.criteria)
        pad = plan.pad_token_id if criteria.eos_token_ids is not None else None
        return LockStepVerification(*rule, call.processors, criteria, pad, call.recorded.scores)

    def verify(
        self,
        batch: Batch,
        logits: Tensor,
        draft: DraftOut,
        keys: NoiseKeys,
        checks_logits: bool = False,
        judged: DeviceVerdict | None = None,
    ) -> Verified:
        """Verify the drafted tokens of a round; the batch is only read.

        Args:
            batch: The rows.
            logits: [B, K+1, V] of the target.
            draft: The drafted tokens.
            keys: Keys of the round's noise.
            checks_logits: Whether to set `has_bad_logits` if the verdict uses NaN or infinite
                logits.
            judged: The verdict of `captured_rule`. None if it did not run.
        """
        if not all(batch.is_finished):
            return self._verify(batch, logits, draft, keys, checks_logits, judged)
        # Forwards continue for other ranks, without processors and criteria.
        return _no_verdict(batch, logits, draft)

    def captured_rule(self, checks_logits: bool) -> RowWiseRule | None:
        """Return the rule of the next round for a device graph; None if it needs the host."""
        return None

    def _verify(
        self,
        batch: Batch,
        logits: Tensor,
        draft: DraftOut,
        keys: NoiseKeys,
        checks_logits: bool,
        judged: DeviceVerdict | None,
    ) -> Verified:
        raise NotImplementedError

    def _verifier_at(self, position: int, batch: Batch, draft: DraftOut) -> Verifier:
        """Return the verifier for a position of the round, after accepting the tokens before it."""
        verifier = self.verifier
        if self.spans is not None:
            verifier = self.spans.around(verifier, batch.host_tokens, draft.token_ids[:, :position])
        return self.ranks.wrap_verifier(verifier)

    def forced_texts(self, batch: Batch) -> list[str]:
        """Return [B] texts that the logits processors force; "" for rows that need no draft."""
        rows = zip(batch.is_finished, batch.num_left, strict=True)
        return self.processors.forced_texts(
            batch.host_tokens, [not ended and num > 1 for ended, num in rows]
        )

    def commit(self, draft: DraftOut, trimmed: Trimmed) -> None:
        """Forget the positions of the round without emitted tokens."""


@dataclass
class RowWiseVerification(Verification):
    """Verification of all rows and positions at once.

    Every row advances by its own number of tokens.
    """

    PARTS = ("spans",)
    REPLACED = ("processors",)

    # All processors are row-wise.
    keeps_padding: bool = False  # whether the KV cache keeps padding after finished rows

    def captured_rule(self, checks_logits: bool) -> RowWiseRule | None:
        is_alone = self.spans is None and not self.ranks.is_distributed
        is_capturable = is_alone and getattr(self.verifier, "is_capturable", False)
        key = self.processors.capture_key if is_capturable else None
        if key is None:
            return None
        return self._rule(self.verifier, checks_logits, (self.verifier, key))

    def _rule(
        self, verifier: Verifier, checks_logits: bool, key: Hashable | None = None
    ) -> RowWiseRule:
        loses_nan = checks_logits and not self.processors.keep_nan
        return RowWiseRule(key, loses_nan, verifier, self.processors)

    def _verify(
        self,
        batch: Batch,
        logits: Tensor,
        draft: DraftOut,
        keys: NoiseKeys,
        checks_logits: bool,
        judged: DeviceVerdict | None,
    ) -> Verified:
        tokens, num_positions = batch.tokens, logits.shape[1]
        rule = self._rule(self._verifier_at(0, batch, draft), checks_logits)
        is_captured = judged is not None
        if judged is None:
            judged = rule(logits, draft, keys, tokens.token_ids, tokens.lens)
        verdict, scores, loses_nan = judged.verdict, judged.scores, rule.loses_nan
        rows, num_accepted, flags, num_drafted = _on_host(judged, draft)  # the round's only wait
        live = [row for row, is_finished in enumerate(batch.is_finished) if not is_finished]
        counted = range(batch.num_rows) if self.keeps_padding else live
        flagged = [row for row in counted if flags[row] & BAD_LOGITS] if checks_logits else []
        has_bad_logits = False
        if loses_nan or flagged:
            num_ids = verdict.token_ids.shape[1]
            is_nan = any(any(rows[row][num_ids:][: num_accepted[row] + 1]) for row in counted)
            has_bad_logits = self.ranks.broadcast_number(
                is_nan or _are_bad(logits, flagged, num_accepted)
            )
        if has_bad_logits:
            self.processors.rollback([num_positions] * batch.num_rows)
        return Verified(
            verdict.token_ids,
            [row[: count + 1] for row, count in zip(rows, num_accepted, strict=True)],
            num_drafted,
            num_accepted,
            reduce(or_, (flags[row] for row in live), 0),
            scores,
            num_host_syncs=1 + bool(flagged),
            device_num_accepted=verdict.num_accepted,
            has_bad_logits=has_bad_logits,
            is_captured=is_captured,
        )

    def commit(self, draft: DraftOut, trimmed: Trimmed) -> None:
        if any(trimmed.num_emitted):
            num_positions = draft.token_ids.shape[1] + 1
            self.processors.rollback([num_positions - count for count in trimmed.num_emitted])


@dataclass
class LockStepVerification(Verification):
    """Verification of one position at a time.

    A round ends when a row finishes or rejects a token. Processors are called as in plain
    `generate`.
    """

    processors: BlockLogitsProcessorList  # the call's whole list
    criteria: BlockStoppingCriteria  # the call's whole list
    # Padding of finished rows. None if they continue decoding, as without an EOS token.
    pad_token_id: int | None
    records_scores: bool  # whether criteria get the scores so far
    _is_finished: Tensor | None = None  # [B] bool
    # the same on the host; empty before the first token
    _has_ended: list[bool] = field(default_factory=list)
    _scores: list[Tensor] = field(default_factory=list)  # each [B, V], one per new token

    def _verify(
        self,
        batch: Batch,
        logits: Tensor,
        draft: DraftOut,
        keys: NoiseKeys,
        checks_logits: bool,
        judged: DeviceVerdict | None,
    ) -> Verified:
        # This check comes before the processors: they must get the same logits as in plain
        # `generate`.
        if checks_logits and self.ranks.broadcast_number(self._begins_with_nan(batch, logits)):
            nothing = _no_verdict(batch, logits, draft)
            return nothing._replace(
                num_drafted=draft.lens.tolist(), num_host_syncs=2, has_bad_logits=True
            )
        # [B, T]; typed as a LongTensor elsewhere
        input_ids: Any = batch.tokens.token_ids[:, : batch.tokens.lens[0]]
        was_finished = self._is_finished
        if was_finished is None:
            was_finished = torch.zeros(batch.num_rows, dtype=torch.bool, device=input_ids.device)
        # Finished rows continue with padding; without EOS they continue with samples, as in plain
        # `generate`.
        is_padded = (
            was_finished if self.pad_token_id is not None else torch.zeros_like(was_finished)
        )
        had_ended = self._has_ended or [False] * batch.num_rows
        status, num_accepted, new_ids = 0, [0] * batch.num_rows, [list[int]() for _ in had_ended]
        columns, scores = [], []
        for position in range(logits.shape[1]):
            step_scores = self.processors(
                input_ids, logits[:, position].to(torch.float32, copy=True)
            )
            verifier = self._verifier_at(position, batch, draft)
            verdict = verifier.verify(*_single_position(step_scores, draft, keys, position))
            next_ids = verdict.token_ids[:, 0].masked_fill(is_padded, self.pad_token_id or 0)
            input_ids = torch.cat([input_ids, next_ids[:, None]], dim=1)
            columns.append(next_ids)
            scores.append(step_scores)
            if self.records_scores:
                self._scores.append(step_scores)
            self._is_finished = is_finished = was_finished | self.criteria.ask(
                input_ids, tuple(self._scores) or None
            )
            ids, accepted, flags, ended = download(
                next_ids[:, None], verdict.num_accepted, verdict.status, is_finished.to(torch.int32)
            )
            self._has_ended = [bool(has_ended) for has_ended in ended]
            new_ids = [row + new for row, new in zip(new_ids, ids, strict=True)]
            num_accepted = [
                before + new for before, new in zip(num_accepted, accepted, strict=True)
            ]
            # The draft of padded rows is padding.
            live = [
                row for row, had in enumerate(had_ended) if not had or self.pad_token_id is None
            ]
            status = reduce(or_, (flags[row] for row in live), status)
            if not all(accepted[row] for row in live) or self._has_ended != had_ended:
                break
        return Verified(
            torch.stack(columns, dim=1),  # [B, N]
            new_ids,
            draft.lens.tolist(),
            num_accepted,
            status,
            torch.stack(scores, dim=1),
            self._has_ended,
            num_host_syncs=len(columns) + 1 + checks_logits,
            num_user_host_syncs=len(columns),
        )

    def _begins_with_nan(self, batch: Batch, logits: Tensor) -> bool:
        """Return whether logits [B, K+1, V] are NaN at a row's first position.

        A NaN from a drafted token spreads over all positions of its row.
        """
        tops = logits[:, 0].amax(-1).tolist()
        rows = zip(batch.is_finished, tops, strict=True)
        return any(
            isnan(top) for is_finished, top in rows if not is_finished or self.pad_token_id is None
        )


def _on_host(judged: DeviceVerdict, draft: DraftOut) -> list[Any]:
    """Return ids, accepted tokens, status flags and drafted tokens of each row on the host."""
    if judged.packed is not None:
        return unpack(judged.packed, judged.ids.shape[1])
    _, num_accepted, status = judged.verdict
    return download(judged.ids, num_accepted, status, draft.lens.to(torch.int32))


def _no_verdict(batch: Batch, logits: Tensor, draft: DraftOut) -> Verified:
    """Return the verdict of a round without output."""
    nothing = [0] * batch.num_rows
    token_ids, is_stopped = (
        draft.token_ids.new_full((batch.num_rows, 1), -1),
        [False] * batch.num_rows,
    )
    return Verified(
        token_ids, [[] for _ in nothing], nothing, nothing, 0, logits, is_stopped, num_host_syncs=0
    )


def _are_bad(logits: Tensor, rows: Sequence[int], positions: Sequence[int]) -> bool:
    """Return whether logits are NaN or infinite in one of the rows.

    Args:
        logits: [B, N, V] of the target, unprocessed.
        rows: Rows to check.
        positions: [B] position to check in each row.
    """
    if not rows:
        return False
    tops = logits.amax(-1).tolist()
    return not all(isfinite(tops[row][positions[row]]) for row in rows)


def _single_position(
    scores: Tensor, draft: DraftOut, keys: NoiseKeys, position: int
) -> tuple[Tensor, DraftOut, NoiseKeys]:
    """Return the verifier's arguments for one position; the bonus position has an empty draft."""
    window = slice(position, position + 1)
    token_ids = draft.token_ids[:, window]
    step = draft._replace(
        token_ids=token_ids,
        lens=(draft.lens - position).clamp(0, token_ids.shape[1]),
        token_logits=None if draft.token_logits is None else draft.token_logits[:, window],
        logsumexp=None if draft.logsumexp is None else draft.logsumexp[:, window],
    )
    # The next position is not processed yet: the verifier gets this one twice, and its bonus token
    # is not used.
    target_logits = scores[:, None].expand(-1, token_ids.shape[1] + 1, -1)
    return target_logits, step, keys._replace(positions=keys.positions + position)
