"""Compare graphs with the functions that they capture, and time them, before using them."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

NUM_TIMED = 3  # number of replays, alternating with as many eager forwards
# Tolerated difference between two runs, relative to the largest number. A replay and its function
# run the same kernels, so their bits are equal unless a kernel adds in varying order.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Compiled code rounds differently from the model as loaded, whose norms are often in float32.
CODE_TOLERANCES = {**TOLERANCES, torch.float64: 1e-5}

Run = Callable[[], list[Any]]


class Timer(Protocol):
    """Timer for device work, which returns results and seconds."""

    def timed(self, run: Run) -> tuple[list[Any], float]: ...


class Attempt(NamedTuple):
    """The results of a function."""

    results: list[Any]  # never those of a replay that differs
    difference: str = ""  # how replay and eager forward differ; empty if they agree


def compare(
    candidate: Run,
    eager: Run,
    buffers: Sequence[Tensor],
    tolerances: Mapping[torch.dtype, float] = TOLERANCES,
) -> Attempt:
    """Run a candidate, then the eager steps; compare their results and the buffers they write to.

    The final results and buffers are those of the eager steps.
    """
    results = candidate()
    written = [buffer.clone() for buffer in buffers]
    expected = eager()
    difference = _difference(
        [*_tensors(results), *written], [*_tensors(expected), *buffers], tolerances
    )
    return Attempt(expected, difference)


class _Times(NamedTuple):
    replay_s: list[float]
    rival_s: list[float]


class GraphTrial:
    """Trial of one function's graphs.

    It compares the first replay of each graph with an eager run of the function, and, if it has a
    timer, times the first replays against a rival.
    """

    def __init__(self, timer: Timer | None):
        self._timer = timer
        self._compared: set[Hashable] = set()
        # by number of steps, since a step costs less in a graph of several
        self._times: defaultdict[int, _Times] = defaultdict(lambda: _Times([], []))

    @property
    def slower(self) -> str:
        """Times of replays and the rival's steps, as text; empty if replays are faster."""
        complete = self._complete
        if complete is None:
            return ""
        num_steps, times = complete
        replay_s, rival_s = (median(seconds) / num_steps for seconds in times)
        return (
            "" if replay_s < rival_s else f"{1e3 * replay_s:.3g} ms against {1e3 * rival_s:.3g} ms"
        )

    @property
    def is_timed(self) -> bool:
        """Whether the times for some number of steps are complete."""
        return self._complete is not None

    @property
    def _complete(self) -> tuple[int, _Times] | None:
        timed = self._times.items()
        return next((entry for entry in timed if len(entry[1].rival_s) == NUM_TIMED), None)

    def run(
        self,
        graph: Hashable,
        replay: Run,
        eager: Run,
        num_steps: int,
        buffers: Sequence[Tensor],
        rival: Run | None = None,
    ) -> Attempt:
        """Run `num_steps` steps from a graph, or by the rival if it is its turn to be timed.

        The rival is the eager run unless another is given. If several run, the rival comes last, so
        the buffers are those of the rival; see `compare`.
        """
        if graph not in self._compared:
            attempt = compare(replay, eager, buffers)
            if not attempt.difference:
                self._compared.add(graph)
            if rival is None or self.is_timed:  # the rival may have to be captured first
                return attempt
            return attempt._replace(results=rival())
        if self.is_timed:
            return Attempt(replay())
        if self._timer is None:
            return Attempt(replay())
        times = self._times[num_steps]
        is_rival = len(times.rival_s) < len(times.replay_s)
        results, seconds = self._timer.timed((rival or eager) if is_rival else replay)
        (times.rival_s if is_rival else times.replay_s).append(seconds)
        return Attempt(results)


def _difference(
    replayed: Sequence[Tensor], expected: Sequence[Tensor], tolerances: Mapping[torch.dtype, float]
) -> str:
    """Describe how a replay differs from the expected results; empty if it does not."""
    pairs = [
        (replay.reshape(-1), eager.reshape(-1))
        for replay, eager in zip(replayed, expected, strict=True)
    ]
    numbers = [(replay, eager) for replay, eager in pairs if replay.is_floating_point()]
    is_same = True
    for replay, eager in numbers:
        differs = (replay != eager) & ~(replay.isnan() & eager.isnan())
        if not bool(differs.any()):
            continue
        is_same = False
        largest = float(eager.abs().nan_to_num(0.0, posinf=0.0, neginf=0.0).amax())
        gap = float((replay - eager).abs().masked_fill(~differs, 0.0).nan_to_num(torch.inf).amax())
        if gap > tolerances.get(eager.dtype, 0.0) * largest:
            return f"by {gap:.3g}, where the largest number is {largest:.3g}"
    # Unless logits are bitwise equal, ties may break differently.
    ids = [(replay, eager) for replay, eager in pairs if is_same and not replay.is_floating_point()]
    num_tokens = sum(int((replay != eager).sum()) for replay, eager in ids)
    return f"in {num_tokens} tokens" if num_tokens else ""


def _tensors(tree: Any) -> list[Tensor]:
    """List the tensors in nested sequences."""
    if isinstance(tree, Tensor):
        return [tree]
    return (
        [tensor for child in tree for tensor in _tensors(child)]
        if isinstance(tree, tuple | list)
        else []
    )
