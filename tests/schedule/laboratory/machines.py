"""Define machines of the laboratory: seconds of forwards in plain steps, and noise of clocks."""

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

# Milliseconds of a float32 verification of SmolLM2-135M by query tokens of all rows, on one thread.
SMOLLM2_MS = {
    1: 34, 2: 39, 3: 46, 4: 56, 5: 58, 6: 60, 8: 64, 9: 68, 11: 77, 16: 86, 24: 106, 32: 124,
    40: 145, 48: 163, 72: 217, 88: 257,
}  # fmt: skip
PROMPT_LEN = 64  # tokens of the prompts read by `Machine.prompt`
LONG_READ = 32  # up to this many tokens, a draft model reads a token in `Machine.read`


class Machine(NamedTuple):
    """Seconds of all forwards; a plain step of one row takes about 1."""

    name: str
    score: Callable[[int, int], float]  # of rows and K
    draft: Callable[[int, int], float]  # seconds of a model's draft, of rows and K
    lookup: Callable[[int], float] = lambda num_rows: 0.003 + 0.002 * num_rows  # of rows
    prompt: Callable[[int], float] = lambda num_rows: 0.0  # the draft reads 64 tokens of each row
    read: float = 0.0  # the draft reads a token emitted without it
    step_ratio: float = 0.0  # of a draft step, as far as model sizes tell
    batches: Sequence[int] = (1, 8)
    max_draft_tokens: int = 10

    def reading_s(self, num_unread: Sequence[int]) -> float:
        """Return the seconds for reading these tokens of each row before the first draft.

        Prompts of joined rows are read by themselves.
        """
        long = [num for num in num_unread if num > LONG_READ]
        short = max((num for num in num_unread if num <= LONG_READ), default=1)
        prompts_s = self.prompt(len(long)) * fmean(long) / PROMPT_LEN if long else 0.0
        return prompts_s + self.read * (short - 1)


def _interpolated(points: dict[int, float]) -> Callable[[int], float]:
    """Return a function that is linear between points and beyond the last two."""
    known = sorted(points)

    def seconds(num: int) -> float:
        right = min(max(bisect_left(known, num), 1), len(known) - 1)
        low, high = known[right - 1], known[right]
        return points[low] + (points[high] - points[low]) * (num - low) / (high - low)

    return seconds


_smollm2 = _interpolated({num: ms / SMOLLM2_MS[1] for num, ms in SMOLLM2_MS.items()})


def _gpu(num_rows: int, num: int) -> float:
    """Return seconds of an 8B target on an H200, from graphs.

    A step of 8 rows takes 12 ms, K = 1 takes 17.4 ms, and K = 5 takes 39.6 ms.
    """
    if num_rows == 1:
        return 1 + 0.02 * num
    return (1.9 + 0.01 * num_rows) * (1 + 0.25 * num * num_rows / 8)


def _gpu_eager(num_rows: int, num: int) -> float:
    """Return seconds of the same target without graphs.

    A step of one row takes 24 ms and one of 8 rows 28 ms. Launches bound both.
    """
    return 1 + 0.02 * (num_rows - 1) + (0.02 if num_rows == 1 else 0.05 * num_rows / 8) * num


def _offloaded(num_rows: int, num: int) -> float:
    return 1 + 0.005 * max(num_rows * (num + 1) - 32, 0)


def _never(num_rows: int, num: int) -> float:
    """Return seconds without a draft model."""
    return 0.0


def _compiled_cpu(num_rows: int, num: int) -> float:
    return (
        1 + 0.07 * num
        if num_rows == 1
        else (1.2 + 0.025 * num_rows) / 1.2 * (1 + 0.02 * num_rows * num)
    )


LOOKUP_MACHINES = [
    Machine("smollm2-cpu", lambda n, k: _smollm2(n * (k + 1)), _never),
    Machine("compiled-cpu", _compiled_cpu, _never, lambda n: 0.005 * n),
    Machine("h200", _gpu, _never, lambda n: 0.02 + 0.01 * n),
    Machine("ideal", lambda n, k: 1 + 0.01 * k, _never, lambda n: 0.005),
    Machine("offload", _offloaded, _never, lambda n: 0.0001),
]


def _model_machine(
    name: str,
    score: Callable[[int, int], float],
    draft: Callable[[int, int], float],
    prompt: Callable[[int], float],
    read: float,
    step_ratio: float,
    batches: Sequence[int] = (1, 8),
) -> Machine:
    return Machine(
        name, score, draft, prompt=prompt, read=read, step_ratio=step_ratio, batches=batches
    )


MODEL_MACHINES = [
    _model_machine(
        "pair-cpu",
        lambda n, k: 0.94 + 0.05 * n * (k + 1) + (0.03 if k else 0),
        lambda n, k: 0.21 * k * (0.9 + 0.1 * n),
        lambda n: 0.3 + 0.25 * n,
        0.01,
        0.18,
    ),
    _model_machine(
        "compiled-cpu",
        lambda n, k: 1 + 0.2 * k * n / 8,
        lambda n, k: 0.12 * k,
        lambda n: 1.0,
        0.01,
        0.18,
        (8,),
    ),
    _model_machine(
        "h200",
        _gpu,
        lambda n, k: k * (0.2 if n == 1 else 0.43),
        lambda n: 1.0 if n == 1 else 5.0 * n / 8,
        0.01,
        0.16,
    ),
    _model_machine(
        "ideal", lambda n, k: 1 + 0.01 * k, lambda n, k: 0.17 * k, lambda n: 0.5, 0.003, 0.17
    ),
    _model_machine("offload", _offloaded, lambda n, k: 0.01 * k, lambda n: 0.05, 0.001, 0.01),
    _model_machine(
        "useless", lambda n, k: 1 + 0.03 * k, lambda n, k: 0.9 * k, lambda n: 1.0, 0.02, 0.5
    ),
]
# K = 5 of an H200 takes 79 ms a round of one row and 106 ms of 8. A draft has half the target's
# layers.
EAGER_GPU = _model_machine(
    "h200-eager",
    _gpu_eager,
    lambda n, k: (0.45 if n == 1 else 0.5) * k,
    lambda n: 0.5 + 0.25 * n,
    0.01,
    0.15,
)
# K = 5 of an H100 from graphs takes 30 ms a round of one row, K = 3 takes 21 ms.
GRAPH_GPU = _model_machine(
    "h100-graphs", _gpu, lambda n, k: 0.32 * k, lambda n: 1.0 if n == 1 else 5.0 * n / 8, 0.01, 0.16
)
SMALL_HEAD = _model_machine(
    "head-cpu",
    lambda n, k: _smollm2(n * (k + 1)),
    lambda n, k: (0.05 + 0.01 * n) * k,
    lambda n: 0.1 * n,
    0.003,
    0.08,
)


class Noise(NamedTuple):
    """Noise of a clock."""

    jitter: float  # of a round, lognormal
    pause_rate: float  # of rounds that take four times as long


NOISES = {
    "none": Noise(0.0, 0.0),
    "5%": Noise(0.05, 0.0),
    "5%+pauses": Noise(0.05, 0.02),
    "20%+pauses": Noise(0.2, 0.02),
}
PAUSE = 4.0


class Clock:
    """Clock with noise by a seed."""

    def __init__(self, noise: Noise, seed: int) -> None:
        self._noise, self._generator = noise, random.Random(seed)
        self.mean = math.exp(noise.jitter**2 / 2) * (1 + noise.pause_rate * (PAUSE - 1))

    def factor(self) -> float:
        """Return the factor of the next round's seconds."""
        jitter, pause_rate = self._noise
        factor = self._generator.lognormvariate(0, jitter) if jitter else 1.0
        return factor * PAUSE if pause_rate and self._generator.random() < pause_rate else factor
