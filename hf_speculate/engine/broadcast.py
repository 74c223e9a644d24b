"""Lets the first process of a tensor-parallel model choose for all of them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_speculate.cache.base import KVCache
from hf_speculate.draft.base import Drafter
from hf_speculate.engine.distributed import Shards
from hf_speculate.processors.stopping_criteria import StopVerdict
from hf_speculate.schedule import RoundOutcome, Schedule
from hf_speculate.types import DraftOut, Fed, Kept, NoiseKeys, SampleStrategy, Verdict
from hf_speculate.verify.base import Verifier

BlockStopping = Callable[[Tensor, Sequence[int], Sequence[int]], StopVerdict]
Criteria = Callable[[Tensor, tuple[Tensor, ...] | None], Tensor]


class LedSchedule:
    """A schedule that reads the clock, as the first process's does.

    Args:
        schedule: this process's own.
        shards: the processes.
    """

    def __init__(self, schedule: Schedule, shards: Shards):
        self.schedule = schedule
        self.shards = shards
        self._num = self._first()

    @property
    def num_draft_tokens(self) -> int:
        """See `Schedule.num_draft_tokens`."""
        return self._num

    def begin(self, prompt_s: float, num_prompt_tokens: int, num_left: int) -> None:
        """See `Schedule.begin`."""
        self.schedule.begin(prompt_s, num_prompt_tokens, num_left)
        self._num = self._first()

    def update(self, outcome: RoundOutcome) -> None:
        """See `Schedule.update`."""
        self.schedule.update(outcome)
        self._num = self._first()

    def _first(self) -> int:
        return int(self.shards.first(torch.tensor(self.schedule.num_draft_tokens)))


class LedDrafter:
    """A drafter whose proposal is the first process's.

    Every process drafts: the draft's cache is then everywhere up to date, and the draft may be tensor-parallel too.
    Those that copy from a store of their own may have copied something else.

    Args:
        drafter: this process's own.
        shards: the processes.
    """

    def __init__(self, drafter: Drafter, shards: Shards):
        self.drafter = drafter
        self.shards = shards

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
        """See `Drafter.draft`."""
        own = self.drafter.draft(query_token_ids, kv_cache, num_draft_tokens, sample_strategy, keys=keys, kept=kept)
        num_own = own.token_ids.shape[1]
        packed = own.token_ids.new_full((len(own.token_ids), num_draft_tokens + 2), -1)  # [B, K' + 2]
        packed[:, :num_own] = own.token_ids
        packed[:, -2] = own.lens
        packed[:, -1] = num_own
        first = self.shards.first(packed)
        num = int(first[0, -1])
        proposal = own._replace(token_ids=first[:, :num], lens=first[:, -2].to(own.lens.dtype))
        if num == num_own:
            return proposal
        fed = own.fed or Fed(num_own - 1 if kv_cache is not None else 0, [False] * len(first))
        return proposal._replace(token_logits=None, logsumexp=None, fed=fed)

    def rows(self, indices: Sequence[int]) -> None:
        """See `Drafter.rows`."""
        self.drafter.rows(indices)


class LedVerifier:
    """A verifier whose verdict is the first process's.

    Args:
        verifier: this process's own.
        shards: the processes.
    """

    def __init__(self, verifier: Verifier, shards: Shards):
        self.verifier = verifier
        self.shards = shards

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        """See `Verifier.verify`."""
        own = self.verifier.verify(target_logits, draft, keys)
        counts = torch.stack([own.num_accepted, own.status], dim=1).to(torch.int64)  # [B, 2]
        first = self.shards.first(torch.cat([own.token_ids, counts], dim=1))
        return Verdict(first[:, :-2], first[:, -2].to(torch.int32), first[:, -1].to(torch.int32))


def led_stopping(stopping: BlockStopping, shards: Shards) -> BlockStopping:
    """Criteria on blocks that stop rows where the first process's do: those of others may read another clock.

    Args:
        stopping: this process's own, as `BlockStoppingCriteria`.
        shards: the processes.
    """

    def stop(token_ids: Tensor, prefix_lens: Sequence[int], num_new: Sequence[int]) -> StopVerdict:
        own = stopping(token_ids, prefix_lens, num_new)
        num_emitted, is_done = shards.first(torch.tensor([own.num_emitted, own.is_done], dtype=torch.int64)).tolist()
        return StopVerdict(num_emitted, [bool(done) for done in is_done])

    return stop


def led_criteria(criteria: Criteria, shards: Shards) -> Criteria:
    """Criteria on one token that stop rows where the first process's do.

    Args:
        criteria: this process's own, as `StoppingCriteriaList`.
        shards: the processes.
    """

    def stop(input_ids: Tensor, scores: tuple[Tensor, ...] | None) -> Tensor:
        return shards.first(criteria(input_ids, scores).to(torch.uint8)).bool()  # [B]; not every backend sends bool

    return stop
