"""Graph trial: before graphs are relied on, they are compared with eager forwards of the same model, and timed."""

from collections.abc import Callable, Hashable, Sequence
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_speculate.options.compiled.language_model import States

NUM_TIMED = 3  # replays, and as many eager forwards in turn with them
# How far apart a replay and an eager forward may be, relative to the largest number. Both run the same kernels, which
# give the same bits unless they add in an order that varies.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

Run = Callable[[], list[Any]]


class Timer(Protocol):
    """Runs what is given, and says how long the device took."""

    def timed(self, run: Run) -> tuple[list[Any], float]: ...


class Attempt(NamedTuple):
    """The results of a function, and their difference to the eager ones."""

    results: list[Any]
    difference: str = ""  # how the replay differed from the eager forward, whose results these are then; or empty


class GraphTrial:
    """Compares the first replay of each graph of one function, and times the first ones if there is a timer."""

    def __init__(self, timer: Timer | None):
        self._timer = timer
        self._compared: set[Hashable] = set()
        self._replay_s: list[float] = []  # seconds of one step
        self._eager_s: list[float] = []

    @property
    def slower(self) -> str:
        """That graphs are not faster than eager forwards, in words; empty if they are, or if it is not known."""
        if not self._is_timed:
            return ""
        replay_s, eager_s = median(self._replay_s), median(self._eager_s)
        return "" if replay_s < eager_s else f"{1e3 * replay_s:.3g} ms against {1e3 * eager_s:.3g} ms"

    @property
    def _is_timed(self) -> bool:
        return len(self._eager_s) == NUM_TIMED

    def run(self, graph: Hashable, replay: Run, eager: Run, num_steps: int, states: States | None) -> Attempt:
        """Run `num_steps` steps from a graph, or eagerly in its place while both are timed.

        The eager steps come last where both run, so that the states are theirs.
        """
        if graph not in self._compared:
            replayed, buffers = replay(), () if states is None else (states.keys[-1], states.values[-1])
            written = [buffer.clone() for buffer in buffers]
            expected = eager()
            difference = _difference([*_tensors(replayed), *written], [*_tensors(expected), *buffers])
            if not difference:
                self._compared.add(graph)
            return Attempt(expected, difference)
        if self._is_timed:
            return Attempt(replay())
        is_eager = len(self._eager_s) < len(self._replay_s)
        if self._timer is None:
            return Attempt(replay())
        results, seconds = self._timer.timed(eager if is_eager else replay)
        (self._eager_s if is_eager else self._replay_s).append(seconds / num_steps)
        return Attempt(results)


def _difference(replayed: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """What is wrong with a replay; empty if nothing is."""
    pairs = [(mine.reshape(-1), twin.reshape(-1)) for mine, twin in zip(replayed, expected, strict=True)]
    numbers = [(mine, twin) for mine, twin in pairs if mine.is_floating_point()]
    is_same = True
    for mine, twin in numbers:
        differs = (mine != twin) & ~(mine.isnan() & twin.isnan())
        if not bool(differs.any()):
            continue
        is_same = False
        largest = float(twin.abs().nan_to_num(0.0, posinf=0.0, neginf=0.0).amax())
        gap = float((mine - twin).abs().masked_fill(~differs, 0.0).nan_to_num(torch.inf).amax())
        if gap > TOLERANCES.get(twin.dtype, 0.0) * largest:
            return f"by {gap:.3g}, where the largest number is {largest:.3g}"
    # If logits are not the same to the last bit, ties may fall otherwise.
    num = sum(int((mine != twin).sum()) for mine, twin in pairs if is_same and not mine.is_floating_point())
    return f"in {num} tokens" if num else ""


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors in nested sequences."""
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for part in tree for tensor in _tensors(part)] if isinstance(tree, tuple | list) else []
