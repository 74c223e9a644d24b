"""Find the ranks of a call: synced ranks, a tensor-parallel group, or both."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from hf_speculate.engine.ranks import ONE_PROCESS, Ranks
from hf_speculate.options.ranks.synced import SyncedRanks, must_sync
from hf_speculate.options.ranks.tensor_parallel import TensorParallelGroup, tensor_parallel_group


@dataclass(frozen=True)
class SyncedGroup(SyncedRanks, TensorParallelGroup):
    """Synced ranks that consist of tensor-parallel groups.

    Ranks of one group decode the same text. Flags are combined over all ranks.
    """


def find_ranks(
    synced_gpus: bool | None, models: Sequence[PreTrainedModel], device: torch.device
) -> Ranks:
    """Find the ranks of a call; see `engine.ranks`."""
    group = tensor_parallel_group(models, device)
    if not must_sync(synced_gpus, models):
        return group or ONE_PROCESS
    return SyncedRanks(device) if group is None else SyncedGroup(group.group, device)
