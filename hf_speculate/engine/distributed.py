"""Distributed calls: ranks that must run equally many forwards, and tensor-parallel groups that must agree."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled


@dataclass(frozen=True)
class SyncedRanks:
    """The ranks that must run as many forwards as this one, because each forward gathers weights from all of them."""

    device: torch.device

    def max(self, num: int | None) -> int | None:
        """The largest number of any rank; None if every rank passes None."""
        wish = torch.tensor(0 if num is None else num + 1, device=self.device)
        dist.all_reduce(wish, op=dist.ReduceOp.MAX)
        agreed = int(wish)
        return agreed - 1 if agreed else None


def synced_ranks(wanted: bool | None, models: Iterable[nn.Module], device: torch.device) -> SyncedRanks | None:
    """The ranks that must run equally many forwards: as `synced_gpus` says, else by ZeRO-3 and FSDP; or None."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    if wanted is None:
        wanted = is_deepspeed_zero3_enabled() or any(is_fsdp_managed_module(model) for model in models)
    return SyncedRanks(device) if wanted else None


@dataclass(frozen=True)
class TensorParallelGroup:
    """The processes that compute one tensor-parallel model together; all of them use what rank 0 decides.

    Each has the same tokens and the same logits. Clocks, generators and users' state differ, and processes that decide
    differently would add up parts of different forwards, or wait for one that never comes.
    """

    group: dist.ProcessGroup
    device: torch.device

    def broadcast(self, numbers: Tensor) -> Tensor:
        """Rank 0's numbers, of one shape and dtype on all ranks, on every rank; `numbers` is left as it is."""
        shared = numbers.to(self.device, copy=True, memory_format=torch.contiguous_format)
        dist.broadcast(shared, src=dist.get_global_rank(self.group, 0), group=self.group)
        return shared.to(numbers.device)


def tensor_parallel_size(model: PreTrainedModel) -> int:
    """The number of processes that hold a part of each large weight; 1 without tensor parallelism."""
    return getattr(model, "tp_size", None) or 1


def tensor_parallel_group(models: Iterable[PreTrainedModel], device: torch.device) -> TensorParallelGroup | None:
    """The processes that compute one of the models together; None if this process computes them alone."""
    weights = (weight for one in models if tensor_parallel_size(one) > 1 for weight in one.parameters())
    meshes: Iterator[Any] = (weight.device_mesh for weight in weights if hasattr(weight, "device_mesh"))  # a DTensor's
    for mesh in meshes:
        names = mesh.mesh_dim_names or ("tp",)  # older versions of transformers name none; FSDP's have no "tp"
        if "tp" in names:
            return TensorParallelGroup(mesh.get_group(names.index("tp")), device)
    return None
