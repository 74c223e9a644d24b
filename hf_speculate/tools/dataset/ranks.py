"""Finds the ranks of a launcher, over which the rows of a data set are split."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from hf_speculate.errors import import_extra

# Ranks wait for the slowest one at the end. The launcher ends all of them if one dies.
_TIMEOUT = timedelta(days=30)


@dataclass(frozen=True)
class Ranks:
    """This process among those of a launcher."""

    index: int = 0  # of this process; the main one, 0, does what is done once for all
    num: int = 1  # number of processes
    state: Any = None  # accelerate's `PartialState`; None for a single process

    @property
    def is_main(self) -> bool:
        return self.index == 0

    @property
    def device(self) -> str | None:
        """Of this process; None for any."""
        return None if self.state is None else str(self.state.device)

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
    """The ranks that `accelerate launch` or `torchrun` started, or a single one."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Ranks()
    partial_state = import_extra("accelerate", "ranks").PartialState
    state = partial_state(cpu=is_cpu or not torch.accelerator.is_available(), timeout=_TIMEOUT)
    return Ranks(state.process_index, state.num_processes, state)
