"""Ranks: the processes that decode one call together. A single process is the null object, which changes nothing."""

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

_OPTION = "hf_speculate.options.ranks.find"  # imported where there are several processes
N = TypeVar("N", bool, int, float)


class Ranks:
    """What a call asks of the processes that decode it; one process answers for itself.

    Synced ranks decode texts of their own, and must run equally many forwards. The ranks of a tensor-parallel group
    decode one text, and all use what rank 0 decides. Every process calls a method at the same time.
    """

    is_synced = False  # whether all ranks must run equally many forwards
    is_group = False  # whether this process belongs to a tensor-parallel group

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than this process."""
        return self.is_synced or self.is_group

    def max(self, num: int | None) -> int | None:
        """The largest number of any synced rank; None if every rank passes None."""
        return num

    def min(self, num: int) -> int:
        """The smallest number of any synced rank."""
        return num

    def any(self, flag: bool) -> bool:
        """Whether the flag of any process is set, synced or of the group."""
        return flag

    def broadcast(self, numbers: Tensor) -> Tensor:
        """The numbers of the group's rank 0, of one shape and dtype on all ranks; `numbers` is left as it is."""
        return numbers

    def broadcast_number(self, number: N) -> N:
        """The number of the group's rank 0, of one type on all ranks."""
        return number

    def broadcast_draft(self, own: DraftOut, num_draft_tokens: int, has_cache: bool) -> DraftOut:
        """Return the draft of the group's rank 0; all ranks have drafted, so each cache is up to date.

        Args:
            own: the draft of this rank.
            num_draft_tokens: K of the round at most.
            has_cache: whether the draft was fed to a KV cache.
        """
        return own

    def wrap_verifier(self, verifier: Verifier) -> Verifier:
        """A verifier whose verdict is that of the group's rank 0."""
        return verifier

    def wrap_criteria(self, criteria: BlockStoppingCriteria) -> BlockStoppingCriteria:
        """Stopping criteria whose verdict is that of the group's rank 0, if the ranks may differ."""
        return criteria


ONE_PROCESS = Ranks()


def find_ranks(synced_gpus: bool | None, models: Sequence[PreTrainedModel], device: torch.device) -> Ranks:
    """The ranks of a call: synced as `synced_gpus` says, else by ZeRO-3 and FSDP; a group if a model is split."""
    may_be_synced = synced_gpus is not False and _num_processes() > 1
    if not may_be_synced and all(tensor_parallel_size(model) == 1 for model in models):
        return ONE_PROCESS
    ranks: Ranks = importlib.import_module(_OPTION).find_ranks(synced_gpus, models, device)
    return ranks


def _num_processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def tensor_parallel_size(model: PreTrainedModel) -> int:
    """The number of processes that hold a part of each large weight; 1 without tensor parallelism."""
    return getattr(model, "tp_size", None) or 1
