"""Synced ranks: each forward gathers weights from all ranks, so all run the same number."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from hf_speculate.engine.ranks import Ranks


@dataclass(frozen=True)
class SyncedRanks(Ranks):
    """Ranks that run the same number of forwards.

    Each forward gathers weights from all ranks.
    """

    device: torch.device
    is_synced = True

    def max(self, num: int | None) -> int | None:
        value = torch.tensor(0 if num is None else num + 1, device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        agreed = int(value)
        return agreed - 1 if agreed else None

    def min(self, num: int) -> int:
        value = torch.tensor(num, device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MIN)
        return int(value)

    def any(self, flag: bool) -> bool:
        return self.min(int(not flag)) == 0


def must_sync(synced_gpus: bool | None, models: Iterable[nn.Module]) -> bool:
    """Return whether ranks must run the same number of forwards.

    `synced_gpus` decides. If it is None, ranks of ZeRO-3 and FSDP must.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return False
    if synced_gpus is not None:
        return synced_gpus
    return is_deepspeed_zero3_enabled() or any(is_fsdp_managed_module(model) for model in models)
