"""Keeps the processes of a distributed call in step."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled


class Peers:
    """The processes that must run as many forwards as this one, for each forward gathers weights from all of them.

    Args:
        device: where the number lies that they exchange once a round.
    """

    def __init__(self, device: torch.device):
        self.device = device

    def agree(self, num_draft_tokens: int | None) -> int | None:
        """K of the coming round on every rank: the most that any of them wants; None: all have finished.

        Args:
            num_draft_tokens: what this rank wants; None: it has finished.
        """
        wish = torch.tensor(0 if num_draft_tokens is None else num_draft_tokens + 1, device=self.device)
        dist.all_reduce(wish, op=dist.ReduceOp.MAX)
        agreed = int(wish)
        return agreed - 1 if agreed else None


def peers_of(wanted: bool | None, models: Iterable[nn.Module], device: torch.device) -> Peers | None:
    """The ranks that must run equally many forwards; None: there are none, or this is the only one.

    Args:
        wanted: the call's `synced_gpus`; None: as ZeRO-3 and FSDP need it.
        models: the target, and the draft where there is one.
        device: see `Peers`.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    if wanted is None:
        wanted = is_deepspeed_zero3_enabled() or any(is_fsdp_managed_module(model) for model in models)
    return Peers(device) if wanted else None


class Shards:
    """The processes that compute one tensor-parallel model together; what the first of them chooses, all do.

    Each has the same text and the same logits. Clocks, generators and what users keep differ, and processes that
    chose differently would add up parts of different forwards, or wait for one that never comes.

    Args:
        group: the processes.
        device: where the numbers lie that they exchange.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group = group
        self.device = device

    def first(self, numbers: Tensor) -> Tensor:
        """What the first process passes, on every one of them and on the device of `numbers`, which stay as they are.

        Args:
            numbers: of one shape and dtype in all processes.
        """
        shared = numbers.to(self.device, copy=True, memory_format=torch.contiguous_format)
        dist.broadcast(shared, src=dist.get_global_rank(self.group, 0), group=self.group)
        return shared.to(numbers.device)


def num_shards(model: PreTrainedModel) -> int:
    """How many processes hold a part of each of the model's large weights; 1 without tensor parallelism."""
    return getattr(model, "tp_size", None) or 1


def shards_of(models: Iterable[PreTrainedModel], device: torch.device) -> Shards | None:
    """The processes that compute one of the models together; None: this one computes them alone.

    Args:
        models: the target, and the draft where there is one.
        device: see `Shards`.
    """
    weights = (weight for one in models if num_shards(one) > 1 for weight in one.parameters())
    meshes: Iterator[Any] = (weight.device_mesh for weight in weights if hasattr(weight, "device_mesh"))  # a DTensor's
    for mesh in meshes:
        names = mesh.mesh_dim_names or ("tp",)  # older versions of transformers name none; FSDP's have no "tp"
        if "tp" in names:
            return Shards(mesh.get_group(names.index("tp")), device)
    return None
