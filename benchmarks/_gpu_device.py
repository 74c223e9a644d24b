"""What the parts of `on_gpu.py` ask of the device that they run on."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from _subjects import Oracle
from transformers import PreTrainedModel

ACCEPTANCE = 0.8  # of the oracle


class RoundCost(NamedTuple):
    """What a round did besides the models' forwards."""

    num_launches: int
    num_waits: int  # other than for the event of the verdict's copy
    num_plans: int  # that cuDNN attention built


class Models(NamedTuple):
    """A target with its draft."""

    target: PreTrainedModel
    draft: PreTrainedModel


Call = Callable[[Callable[..., None]], Any]
"""Decodes, with the argument as `speculation_callback`."""


class Device(Protocol):
    """A CUDA device, or one that is simulated."""

    is_dry: bool

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: object) -> None: ...

    def small_pair(self, dtype: torch.dtype) -> Models:
        """A small pair on the device."""

    def large_pair(self) -> tuple[Models, Oracle]:
        """A bfloat16 pair of the shapes of Llama 8B and 1B on the device, and the oracle that fixes its acceptance."""

    def count_rounds(self, models: Models, call: Call) -> list[RoundCost]:
        """What each round of a call costs, the first one left out."""

    def kernels_of(self, run: Callable[[], object]) -> dict[str, Any]:
        """The device's milliseconds in a run: from the first kernel to the last, idle, and by name of the kernel."""

    def seconds(self, run: Callable[[], object], repeats: int) -> float:
        """Seconds of one run, on average, until the device has done it."""

    def graphed(self, run: Callable[[], object], times: int) -> Callable[[], object]:
        """Replays what `run` launches, several times in a row, from a CUDA graph."""

    def recover(self) -> bool:
        """Free what a failed cell held; whether the device can go on."""

    def peak_bytes(self) -> int:
        """The most memory in use since the last call of this method."""
