"""Define the machines of the laboratory: times of forwards in plain steps, and noise of clocks."""

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

# Milliseconds of a float32 verification with SmolLM2-135M on one thread, by the number of query
# tokens in all rows.
SMOLLM2_MS = {
    1: 34, 2: 39, 3: 46, 4: 56, 5: 58, 6: 60, 8: 64, 9: 68, 11: 77, 16: 86, 24: 106, 32: 124,
    40: 145, 48: 163, 72: 217, 88: 257,
}  # fmt: skip
PROMPT_LEN = 64  # number of prompt tokens that `Machine.prompt` reads
LONG_READ = 32  # up to this many tokens, a draft model takes `Machine.read` per token


class Machine(NamedTuple):
    """Times of all forwards; a plain step with one row takes about 1."""

    name: str
    score: Callable[[int, int], float]  # time of a verification, given rows and K
    draft: Callable[[int, int], float]  # time of a model's draft, given rows and K
    # time of a prompt lookup, given rows
    lookup: Callable[[int], float] = lambda num_rows: 0.003 + 0.002 * num_rows
    # time for the draft to read 64 tokens per row, given rows
    prompt: Callable[[int], float] = lambda num_rows: 0.0
    read: float = 0.0  # time for the draft to read a token that was emitted without it
    step_ratio: float = 0.0  # relative cost of a draft step, estimated from model sizes
    batches: Sequence[int] = (1, 8)
    max_draft_tokens: int = 10

    def reading_s(self, num_unread: Sequence[int]) -> float:
        """Return the time to read the given numbers of tokens per row before the first draft.

        Prompts of joined rows are read separately.
        """
        long = [num for num in num_unread if num > LONG_READ]
        short = max((num for num in num_unread if num <= LONG_READ), default=1)
        prompts_s = self.prompt(len(long)) * fmean(long) / PROMPT_LEN if long else 0.0
        return prompts_s + self.read * (short - 1)


def _interpolated(points: dict[int, float]) -> Callable[[int], float]:
    """Return a function that interpolates linearly between points and extrapolates at both ends."""
    known = sorted(points)

    def seconds(num: int) -> float:
        right = min(max(bisect_left(known, num), 1), len(known) - 1)
        low, high = known[right - 1], known[right]
        return points[low] + (points[high] - points[low]) * (num - low) / (high - low)

    return seconds


_smollm2 = _interpolated({num: ms / SMOLLM2_MS[1] for num, ms in SMOLLM2_MS.items()})


def _gpu(num_rows: int, num: int) -> float:
    """Return the time of an 8B target on an H200 with CUDA graphs.

    A step with 8 rows takes 12 ms, K = 1 takes 17.4 ms, and K = 5 takes 39.6 ms.
    """
    if num_rows == 1:
        return 1 + 0.02 * num
    return (1.9 + 0.01 * num_rows) * (1 + 0.25 * num * num_rows / 8)


def _gpu_eager(num_rows: int, num: int) -> float:
    """Return the time of the same target without graphs.

    A step with one row takes 24 ms and a step with 8 rows 28 ms. Launches bound both.
    """
    return 1 + 0.02 * (num_rows - 1) + (0.02 if num_rows == 1 else 0.05 * num_rows / 8) * num


def _offloaded(num_rows: int, num: int) -> float:
    return 1 + 0.005 * max(num_rows * (num + 1) - 32, 0)


def _never(num_rows: int, num: int) -> float:
    """Return the time without a draft model."""
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
# On an H200, a round with K = 5 takes 79 ms for one row and 106 ms for 8. A draft has half of the
# target's layers.
EAGER_GPU = _model_machine(
    "h200-eager",
    _gpu_eager,
    lambda n, k: (0.45 if n == 1 else 0.5) * k,
    lambda n: 0.5 + 0.25 * n,
    0.01,
    0.15,
)
# On an H100 with CUDA graphs, a round of one row takes 30 ms for K = 5 and 21 ms for K = 3.
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

    jitter: float  # standard deviation per round, lognormal
    pause_rate: float  # fraction of rounds that take four times as long


NOISES = {
    "none": Noise(0.0, 0.0),
    "5%": Noise(0.05, 0.0),
    "5%+pauses": Noise(0.05, 0.02),
    "20%+pauses": Noise(0.2, 0.02),
}
PAUSE = 4.0


class Clock:
    """Clock whose noise depends on a seed."""

    def __init__(self, noise: Noise, seed: int) -> None:
        self._noise, self._generator = noise, random.Random(seed)
        self.mean = math.exp(noise.jitter**2 / 2) * (1 + noise.pause_rate * (PAUSE - 1))

    def factor(self) -> float:
        """Return the factor by which the next round is slower."""
        jitter, pause_rate = self._noise
        factor = self._generator.lognormvariate(0, jitter) if jitter else 1.0
        return factor * PAUSE if pause_rate and self._generator.random() < pause_rate else factor
