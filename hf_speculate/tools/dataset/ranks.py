"""Finds the processes among which a launcher wants the rows to be split."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from hf_speculate.errors import ConfigError

# Ranks wait for the slowest at the end, however long; a rank that dies is for the launcher, which ends the others.
_LONGEST_WAIT = timedelta(days=30)


@dataclass(frozen=True)
class Ranks:
    """This process among those of a launch.

    Args:
        index: of this process, from 0, which is the main one.
        num: how many there are.
        device: of this process as torch names it; None: any.
        state: accelerate's `PartialState`; None: there is one process.
    """

    index: int = 0
    num: int = 1
    device: str | None = None
    state: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this process does what one does for all."""
        return self.index == 0

    def wait(self) -> None:
        """Wait until all processes have come here."""
        if self.state is not None:
            self.state.wait_for_everyone()

    def sums(self, numbers: Sequence[int]) -> list[int]:
        """The sum over all processes of each number."""
        if self.state is None:
            return list(numbers)
        from accelerate.utils import gather_object

        return [sum(column) for column in zip(*gather_object([list(numbers)]), strict=True)]

    def close(self) -> None:
        """Leave the group of processes, at the end of this one."""
        if self.state is not None:
            self.state.destroy_process_group()


def find_ranks(is_cpu: bool | None = None) -> Ranks:
    """The ranks that `accelerate launch` or `torchrun` has started; one alone where neither has.

    Args:
        is_cpu: whether all decode on the CPU; None: where there is no accelerator.

    Raises:
        ConfigError: there are several, and accelerate is not installed.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Ranks()
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise ConfigError(
            'accelerate must be installed to split rows over ranks, got none; pip install "hf-speculate[ranks]"'
        ) from error
    if is_cpu is None:
        is_cpu = not torch.accelerator.is_available()
    state = PartialState(cpu=is_cpu, timeout=_LONGEST_WAIT)
    return Ranks(state.process_index, state.num_processes, str(state.device), state)
