"""Keeps the processes of a distributed call in step."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
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
