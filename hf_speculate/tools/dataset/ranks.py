"""Ranks of a launcher: processes that each have a whole model and a share of the rows."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_speculate.engine.ranks import find_ranks as ranks_of_call
from hf_speculate.engine.ranks import tensor_parallel_size
from hf_speculate.errors import UnsupportedModelError, import_extra

# At the end, ranks wait for the slowest rank. If one dies, the launcher terminates all of them.
_TIMEOUT = timedelta(days=30)


@dataclass(frozen=True)
class Ranks:
    """This process among the processes of a launcher."""

    index: int = 0  # index of this process; process 0 is the main process
    num: int = 1  # number of processes
    state: Any = None  # accelerate's `PartialState`; None for a single process

    @property
    def is_main(self) -> bool:
        return self.index == 0

    def wait(self) -> None:
        if self.state is not None:
            self.state.wait_for_everyone()

    def sums(self, numbers: list[int]) -> list[int]:
        if self.state is None:
            return numbers
        gathered = import_extra("accelerate.utils", "ranks").gather_object([numbers])
        return [sum(column) for column in zip(*gathered, strict=True)]

    def close(self) -> None:
        if self.state is not None:
            self.state.destroy_process_group()


def find_ranks(is_cpu: bool = False) -> Ranks:
    """Find the ranks of `accelerate launch` or `torchrun`; without a launcher, a single rank."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Ranks()
    partial_state = import_extra("accelerate", "ranks").PartialState
    state = partial_state(cpu=is_cpu or not torch.accelerator.is_available(), timeout=_TIMEOUT)
    return Ranks(state.process_index, state.num_processes, state)


def check_model(model: PreTrainedModel, ranks: Ranks) -> None:
    """Raise `UnsupportedModelError` for a model distributed over several ranks."""
    if ranks.num == 1:
        return
    if tensor_parallel_size(model) > 1 or ranks_of_call(None, [model], model.device).is_synced:
        raise UnsupportedModelError(
            f"each of {ranks.num} ranks must hold a whole model, got one that is distributed over "
            "them; call "
            "generate() on all ranks instead"
        )
