"""Verification: runs logits processors and the verifier on a round, for all rows at once or in lock step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from hf_speculate.engine.batch import Batch
from hf_speculate.engine.distributed import BroadcastVerifier, TensorParallelGroup
from hf_speculate.processors.row_groups import ProcessorGroups
from hf_speculate.processors.stopping_criteria import BlockStoppingCriteria
from hf_speculate.transfers import download
from hf_speculate.types import DraftOut, NoiseKeys, Trimmed, Verified
from hf_speculate.verify.base import Verifier
from hf_speculate.verify.spans import Spans


@dataclass
class Verification:
    """Decides which tokens of a round are accepted."""

    verifier: Verifier  # the verification rule
    spans: Spans | None  # restricts a lossy verifier to spans; None if it decides everywhere
    group: TensorParallelGroup | None  # processes that use the verdict of rank 0, or None

    def verify(self, batch: Batch, logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verified:
        """Verify a round: the drafted tokens against the target's logits [B, K+1, V]; the batch is only read."""
        if not all(batch.is_finished):
            return self._verify(batch, logits, draft, keys)
        # The forwards go on for other ranks; no processor or criterion is called any more.
        nothing = [0] * batch.num_rows
        token_ids, is_stopped = draft.token_ids.new_full((batch.num_rows, 1), -1), [False] * batch.num_rows
        return Verified(token_ids, [[] for _ in nothing], nothing, nothing, 0, logits, is_stopped, num_host_syncs=0)

    def _verify(self, batch: Batch, logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verified:
        raise NotImplementedError

    def _verifier_at(self, position: int, batch: Batch, draft: DraftOut) -> Verifier:
        """The verifier from a position of the round on, if the tokens before it were accepted."""
        verifier = self.verifier
        if self.spans is not None:
            verifier = self.spans.around(verifier, batch.host_tokens, draft.token_ids[:, :position])
        return verifier if self.group is None else BroadcastVerifier(verifier, self.group)

    def commit(self, draft: DraftOut, trimmed: Trimmed) -> None:
        """Forget the positions of the round that were not emitted."""

    def rows(self, indices: Sequence[int]) -> None:
        """Keep the rows `indices`, in that order."""

    def join(self, other: Any) -> None:
        """Add the rows of `other` behind these."""


@dataclass
class RowWiseVerification(Verification):
    """Verifies all positions of all rows at once; every row advances by its own number of tokens."""

    processors: ProcessorGroups  # the logits processors of each row, all of them row-wise

    def _verify(self, batch: Batch, logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verified:
        tokens, scores = batch.tokens, logits
        if len(self.processors):
            scores = self.processors(tokens.token_ids, scores, draft.token_ids, prefix_lens=tokens.lens)
        verdict = self._verifier_at(0, batch, draft).verify(scores, draft, keys)
        draft_lens = draft.lens.to(torch.int32)
        ids, num_accepted, flags, num_drafted = download(  # the one wait
            verdict.token_ids, verdict.num_accepted, verdict.status, draft_lens
        )
        return Verified(
            verdict.token_ids,
            [row[: num + 1] for row, num in zip(ids, num_accepted, strict=True)],
            num_drafted,
            num_accepted,
            reduce(or_, flags, 0),
            scores,
            device_num_accepted=verdict.num_accepted,
        )

    def commit(self, draft: DraftOut, trimmed: Trimmed) -> None:
        if any(trimmed.num_emitted):
            num_positions = draft.token_ids.shape[1] + 1
            self.processors.rollback([num_positions - num for num in trimmed.num_emitted])

    def rows(self, indices: Sequence[int]) -> None:
        self.processors.rows(indices)
        if self.spans is not None:
            self.spans.rows(indices)

    def join(self, other: "RowWiseVerification") -> None:
        self.processors.join(other.processors)


@dataclass
class LockStepVerification(Verification):
    """Verifies one position at a time until a row finishes or rejects; processors are called as in plain `generate`."""

    processors: LogitsProcessorList  # the call's whole list
    criteria: BlockStoppingCriteria  # the call's whole list
    # what finished rows go on with; None if finished rows go on decoding, as without an EOS token
    pad_token_id: int | None
    records_scores: bool  # whether criteria are shown the scores so far
    _is_finished: Tensor | None = None  # [B] bool
    _scores: list[Tensor] = field(default_factory=list)  # each [B, V], one per new token

    def _verify(self, batch: Batch, logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verified:
        input_ids: Any = batch.tokens.token_ids[:, : batch.tokens.lens[0]]  # [B, T]; typed as a LongTensor elsewhere
        was_finished = self._is_finished
        if was_finished is None:
            was_finished = torch.zeros(batch.num_rows, dtype=torch.bool, device=input_ids.device)
        # finished rows go on with padding; without EOS they go on, and plain `generate` samples from them
        is_padded = was_finished if self.pad_token_id is not None else torch.zeros_like(was_finished)
        num_accepted = torch.zeros(batch.num_rows, dtype=torch.int64, device=input_ids.device)
        status, columns, scores = 0, [], []
        for position in range(logits.shape[1]):
            step_scores = self.processors(input_ids, logits[:, position].to(torch.float32, copy=True))
            verifier = self._verifier_at(position, batch, draft)
            verdict = verifier.verify(*_one_position(step_scores, draft, keys, position))
            next_ids = verdict.token_ids[:, 0].masked_fill(is_padded, self.pad_token_id or 0)
            input_ids = torch.cat([input_ids, next_ids[:, None]], dim=1)
            columns.append(next_ids)
            scores.append(step_scores)
            if self.records_scores:
                self._scores.append(step_scores)
            self._is_finished = is_finished = was_finished | self.criteria.ask(input_ids, tuple(self._scores) or None)
            stays = verdict.num_accepted.bool() | is_padded  # the draft of padded rows is padding
            num_accepted += verdict.num_accepted
            status = reduce(or_, verdict.status[~is_padded].tolist(), status)
            if not bool(stays.all()) or bool((is_finished != was_finished).any()):
                break
        token_ids = torch.stack(columns, dim=1)  # [B, N]
        return Verified(
            token_ids,
            token_ids.tolist(),
            draft.lens.tolist(),
            num_accepted.tolist(),
            status,
            torch.stack(scores, dim=1),
            is_finished.tolist(),
            num_host_syncs=len(columns) + 1,
            num_user_host_syncs=len(columns),
        )


def _one_position(
    scores: Tensor, draft: DraftOut, keys: NoiseKeys, position: int
) -> tuple[Tensor, DraftOut, NoiseKeys]:
    """The verifier's arguments for one position: a draft of one token, or of none at the bonus position."""
    window = slice(position, position + 1)
    token_ids = draft.token_ids[:, window]
    step = DraftOut(
        token_ids,
        (draft.lens - position).clamp(0, token_ids.shape[1]),
        None if draft.token_logits is None else draft.token_logits[:, window],
        None if draft.logsumexp is None else draft.logsumexp[:, window],
    )
    # The row after the token is not processed yet: the verifier is shown this one again, and its draw is not used.
    target_logits = scores[:, None].expand(-1, token_ids.shape[1] + 1, -1)
    return target_logits, step, keys._replace(positions=keys.positions + position)
