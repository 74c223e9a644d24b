"""Broadcasts: wrappers that make distributed ranks agree on schedules, drafts, verdicts and stops."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_speculate.cache.token_buffer import TokenBuffer
from hf_speculate.draft.base import Drafter, DraftRequest
from hf_speculate.engine.batch import Batch
from hf_speculate.engine.distributed import TensorParallelGroup
from hf_speculate.engine.stop_tracker import BlockStopping
from hf_speculate.engine.verification import Verification
from hf_speculate.processors.stopping_criteria import StopVerdict, as_flags
from hf_speculate.schedule import RoundOutcome, Schedule
from hf_speculate.types import CachedDraft, DraftOut, NoiseKeys, Trimmed, Verdict, Verified
from hf_speculate.verify.base import Verifier

Criteria = Callable[[Tensor, tuple[Tensor, ...] | None], Tensor]


@dataclass
class SyncedVerification(Verification):
    """A verification that verifies nothing once all rows of this rank are finished."""

    verification: Verification

    def verify(self, batch: Batch, logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verified:
        if not all(batch.is_finished):
            return self.verification.verify(batch, logits, draft, keys)
        nothing = [0] * batch.num_rows
        return Verified(
            draft.token_ids.new_full((batch.num_rows, 1), -1),
            [[] for _ in nothing],
            nothing,
            nothing,
            0,
            logits,
            is_stopped=[False] * batch.num_rows,
            num_host_syncs=0,
        )

    def commit(self, draft: DraftOut, trimmed: Trimmed) -> None:
        if any(trimmed.num_emitted):
            self.verification.commit(draft, trimmed)

    def rows(self, indices: Sequence[int]) -> None:
        self.verification.rows(indices)


class BroadcastSchedule:
    """A schedule that reads the clock, on a tensor-parallel group: rank 0's choice counts."""

    def __init__(self, schedule: Schedule, group: TensorParallelGroup):
        self.schedule = schedule
        self._group = group
        self._num = self._agreed()

    @property
    def num_draft_tokens(self) -> int:
        return self._num

    def begin(self, prompt_s: float, num_prompt_tokens: int, num_left: int) -> None:
        self.schedule.begin(prompt_s, num_prompt_tokens, num_left)
        self._num = self._agreed()

    def update(self, outcome: RoundOutcome) -> None:
        self.schedule.update(outcome)
        self._num = self._agreed()

    def _agreed(self) -> int:
        return int(self._group.broadcast(torch.tensor(self.schedule.num_draft_tokens, device="cpu")))


class BroadcastDrafter(Drafter):
    """A drafter on a tensor-parallel group: rank 0's draft counts, because drafters may read a store of their own.

    Every rank drafts, so that the draft cache is up to date everywhere and the draft model may be tensor-parallel too.
    """

    def __init__(self, drafter: Drafter, group: TensorParallelGroup):
        self.drafter = drafter
        self._group = group
        self.hidden_layers = drafter.hidden_layers
        self.max_draft_tokens = drafter.max_draft_tokens
        self.reads_host_tokens = drafter.reads_host_tokens
        self.reads_kept = drafter.reads_kept
        self.min_query_len = drafter.min_query_len
        self.drafts_fewer = drafter.drafts_fewer

    def draft(self, request: DraftRequest) -> DraftOut:
        own = self.drafter.draft(request)
        num_own = own.token_ids.shape[1]
        packed = own.token_ids.new_full((len(own.token_ids), request.num_draft_tokens + 2), -1)  # [B, K' + 2]
        packed[:, :num_own] = own.token_ids
        packed[:, -2] = own.lens
        packed[:, -1] = num_own
        agreed = self._group.broadcast(packed)
        num = int(agreed[0, -1])
        draft = own._replace(token_ids=agreed[:, :num], lens=agreed[:, -2].to(own.lens.dtype))
        if num == num_own:
            return draft
        cached = own.cached or CachedDraft(num_own - 1 if request.kv_cache is not None else 0, [False] * len(agreed))
        return draft._replace(token_logits=None, logsumexp=None, cached=cached)

    def project_states(self, states: Tensor) -> Tensor:
        return self.drafter.project_states(states)

    def resume(self, token_ids: Tensor) -> None:
        self.drafter.resume(token_ids)

    def rows(self, indices: Sequence[int]) -> None:
        self.drafter.rows(indices)


@dataclass
class BroadcastVerifier:
    """A verifier on a tensor-parallel group: rank 0's verdict counts."""

    verifier: Verifier
    group: TensorParallelGroup

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        own = self.verifier.verify(target_logits, draft, keys)
        counts = torch.stack([own.num_accepted, own.status], dim=1).to(torch.int64)  # [B, 2]
        agreed = self.group.broadcast(torch.cat([own.token_ids, counts], dim=1))
        return Verdict(agreed[:, :-2], agreed[:, -2].to(torch.int32), agreed[:, -1].to(torch.int32))


def broadcast_stopping(stopping: BlockStopping, group: TensorParallelGroup) -> BlockStopping:
    """Stopping criteria on blocks of which rank 0's verdict counts: another rank's may read another clock."""

    def stop(tokens: TokenBuffer, new_ids: Sequence[list[int]]) -> StopVerdict:
        own = stopping(tokens, new_ids)
        verdict = torch.tensor([own.num_emitted, own.is_done], dtype=torch.int64, device="cpu")  # [2, B]
        num_emitted, is_done = group.broadcast(verdict).tolist()
        return StopVerdict(num_emitted, [bool(done) for done in is_done])

    return stop


def broadcast_criteria(criteria: Criteria, group: TensorParallelGroup) -> Criteria:
    """Stopping criteria on single tokens of which rank 0's answer counts."""

    def stop(input_ids: Tensor, scores: tuple[Tensor, ...] | None) -> Tensor:
        flags = as_flags(criteria(input_ids, scores))
        return group.broadcast(flags.to(torch.uint8)).bool()  # [B]; not every backend sends bool

    return stop
