"""Ranks: the processes that decode one call together.

For a single process, no method communicates.
"""

import importlib
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.processors.stopping_criteria import BlockStoppingCriteria
from hf_speculate.types import DraftOut
from hf_speculate.verify.base import Verifier

_OPTION = "hf_speculate.options.ranks.find"  # imported only if there are several processes
N = TypeVar("N", bool, int, float)


class Ranks:
    """The processes that decode a call.

    This base class stands for a single process. Synced ranks decode different sequences but must
    run the same number of forwards. The ranks of a tensor-parallel group decode one sequence and
    use rank 0's decisions. Every method is a collective operation: all processes must call it.
    """

    is_synced = False  # whether all ranks must run the same number of forwards
    is_group = False  # whether this process belongs to a tensor-parallel group

    @property
    def is_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.is_synced or self.is_group

    def max(self, num: int | None) -> int | None:
        """Return the largest number over all synced ranks; None if every rank passes None."""
        return num

    def min(self, num: int) -> int:
        """Return the smallest number over all synced ranks."""
        return num

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process, a synced rank or one of the group."""
        return flag

    def broadcast(self, numbers: Tensor) -> Tensor:
        """Broadcast numbers from the group's rank 0.

        The shape and dtype must be the same on all ranks. `numbers` is not changed.
        """
        return numbers

    def broadcast_number(self, number: N) -> N:
        """Broadcast a number from the group's rank 0; its type must be the same on all ranks."""
        return number

    def broadcast_draft(self, own: DraftOut, num_draft_tokens: int, has_cache: bool) -> DraftOut:
        """Broadcast the draft from the group's rank 0.

        All ranks have drafted, so each rank's cache is up to date.

        Args:
            own: This rank's draft.
            num_draft_tokens: Maximum draft length K of the round.
            has_cache: Whether the draft tokens were fed to a KV cache.
        """
        return own

    def wrap_verifier(self, verifier: Verifier) -> Verifier:
        """Wrap a verifier so that all ranks get the verdict of the group's rank 0."""
        return verifier

    def wrap_criteria(self, criteria: BlockStoppingCriteria) -> BlockStoppingCriteria:
        """Wrap stopping criteria to broadcast rank 0's result if it may differ within a group."""
        return criteria


ONE_PROCESS = Ranks()


def find_ranks(
    synced_gpus: bool | None, models: Sequence[PreTrainedModel], device: torch.device
) -> Ranks:
    """Find the ranks for a call.

    Args:
        synced_gpus: Whether ranks are synced. None to detect ZeRO-3 and FSDP.
        models: Models of the call. A model split by tensor parallelism needs a group.
        device: Device of the target's inputs.
    """
    may_be_synced = synced_gpus is not False and _num_processes() > 1
    if not may_be_synced and all(tensor_parallel_size(model) == 1 for model in models):
        return ONE_PROCESS
    ranks: Ranks = importlib.import_module(_OPTION).find_ranks(synced_gpus, models, device)
    return ranks


def _num_processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def tensor_parallel_size(model: PreTrainedModel) -> int:
    """Return the number of processes that share each large weight; 1 without tensor parallelism."""
    return getattr(model, "tp_size", None) or 1
