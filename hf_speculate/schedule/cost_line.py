"""The cost line: seconds of a round by size, estimated from rounds of a few sizes, which vary by a fifth."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import mul
from statistics import median_low
from typing import NamedTuple

TINY = 1e-18  # keeps a division from failing if all sizes lie on the line, or the clock is too coarse
_NUM_SAMPLES = 24  # newest rounds of one size that are kept
_MOST_TIMES = 3.0  # the expected seconds that a sample counts as; a pause of the process may take a hundred times
_FEW = 3  # rounds whose median may be compared with other seconds
_BANDWIDTH = 0.3  # in the logarithm of a size, within which one size says much about another
_OTHER_WEIGHT = 0.1  # weight of the residual of another size, at most
_NOISE = 0.025  # share of a round's seconds; half as much or twice as much loses 1 % where some sizes are slow
_LEAST_SHARE = 0.25  # share of the line's seconds that an estimate is at least
_FADE = 0.99  # factor of a size's weight, for every drafted round by which another size is newer
_LEAST_VARIANCE = 1e-9  # variance of sizes below which they are equal but for rounding

Key = tuple[int, int]  # rows, and the size that seconds grow with


class Cost(NamedTuple):
    """Seconds of the newest rounds of one number of rows and size."""

    num_samples: int
    median_s: float
    newest: int  # drafted rounds before the newest of these


@lru_cache(1024)
def _likeness(size: int, other: int) -> float:
    return 1 / (1 + (math.log(size / other) / _BANDWIDTH) ** 4)


@lru_cache(64)
def _likenesses(sizes: Sequence[int], keys: tuple[Key, ...]) -> list[list[float]]:
    """[M][N] likeness of N measured sizes to each of M sizes."""
    return [
        [1.0 if size == known_size else _OTHER_WEIGHT * _likeness(size, known_size) for _, known_size in keys]
        for size in sizes
    ]


class CostLine:
    """Seconds by size: a line fitted to the measured sizes, plus the residuals of those near that size."""

    def __init__(self, is_proportional: bool = False) -> None:
        self.costs: dict[Key, Cost] = {}
        self._is_proportional = is_proportional  # until two sizes were measured; otherwise constant
        self._samples: dict[Key, tuple[float, ...]] = {}

    def add(self, rows: int, size: int, seconds: float, num_drafted: int, most_s: float = math.inf) -> None:
        """Add a sample; the first one of its size counts as `most_s` at most, and only until there is a second."""
        key = (rows, size)
        if key not in self.costs and seconds > most_s:
            self.costs[key] = Cost(1, most_s, num_drafted)
            return
        if self.costs:
            expected_s = self.costs[key].median_s if key in self.costs else self.estimate(rows, (size,))[0]
            seconds = min(seconds, _MOST_TIMES * expected_s)
        samples = self._samples[key] = (*self._samples.get(key, ()), seconds)[-_NUM_SAMPLES:]
        self.costs[key] = Cost(len(samples), median_low(samples), num_drafted)

    def cap_first(self, most_s: Callable[[Key], float]) -> None:
        """Let single samples count as `most_s` of their size at most."""
        for key, cost in self.costs.items():
            if cost.num_samples == 1 and cost.median_s > most_s(key):
                self.costs[key] = cost._replace(median_s=most_s(key))
                self._samples.pop(key, None)

    def usual_s(self, rows: int, size: int) -> float | None:
        """Seconds of a size that was measured more than once; None for others."""
        cost = self.costs.get((rows, size))
        return None if cost is None or cost.num_samples < 2 else cost.median_s

    def scale(self, factor: float) -> None:
        """Let all sizes take `factor` times as long, because the machine has become slower or faster."""
        for key, samples in self._samples.items():
            self._samples[key] = tuple(factor * sample for sample in samples)
        for key, cost in self.costs.items():
            self.costs[key] = cost._replace(median_s=factor * cost.median_s)

    def line(self, rows: int) -> tuple[float, float]:
        """Intercept and slope; sizes of other numbers of rows and older sizes weigh less."""
        return self._fit(self._weights(rows))

    def _fit(self, weights: list[float]) -> tuple[float, float]:
        """Intercept and slope of the weighted least-squares line."""
        sizes, medians = [size for _, size in self.costs], [cost.median_s for cost in self.costs.values()]
        total = sum(weights)
        mean_size, mean_s = sum(map(mul, weights, sizes)) / total, sum(map(mul, weights, medians)) / total
        distances = [size - mean_size for size in sizes]
        weighted = list(map(mul, weights, distances))
        variance = sum(map(mul, weighted, distances))
        steepest = mean_s / mean_size  # seconds are proportional to the size
        if variance <= _LEAST_VARIANCE * total:  # all are of one size
            slope = steepest if self._is_proportional else 0.0
        else:
            slope = min(max(sum(map(mul, weighted, medians)) / variance, 0.0), steepest)
        return mean_s - slope * mean_size, slope

    def estimate(self, rows: int, sizes: Sequence[int]) -> list[float]:
        """[M] seconds for M sizes."""
        weights = self._weights(rows)
        intercept, slope = self._fit(weights)
        above = [cost.median_s - intercept - slope * size for (_, size), cost in self.costs.items()]
        squares, total = sum(map(mul, weights, map(mul, above, above))), sum(weights)
        # The line counts as this many samples of a size: more if the residuals of all sizes are small.
        noise_s = _NOISE * (intercept + slope * sum(size for _, size in self.costs) / len(self.costs))
        line_weight = noise_s**2 * total / max(squares, TINY)
        weighted = list(map(mul, weights, above))
        seconds = []
        for size, likeness in zip(sizes, _likenesses(sizes, tuple(self.costs)), strict=True):
            line_s = intercept + slope * size
            off_s = sum(map(mul, weighted, likeness)) / (sum(map(mul, weights, likeness)) + line_weight)
            seconds.append(max(line_s + off_s, _LEAST_SHARE * line_s))
        return seconds

    def _weights(self, rows: int) -> list[float]:
        """[N] weights of the measured sizes in the line of so many rows."""
        latest = max(cost.newest for cost in self.costs.values())
        return [
            cost.num_samples * _FADE ** (latest - cost.newest) * _likeness(rows, others)
            for (others, _), cost in self.costs.items()
        ]

    def medians(self) -> list[tuple[int, float]]:
        """Size and seconds of each measurement."""
        return [(size, cost.median_s) for (_, size), cost in self.costs.items()]

    def least_median_s(self, size: int) -> float:
        """Seconds of the fastest size, `size` or more, that was measured a few times; infinite without any."""
        medians = (cost.median_s for (_, at), cost in self.costs.items() if at >= size and cost.num_samples >= _FEW)
        return min(medians, default=math.inf)

    def settled(self, is_settled: Callable[[Cost], bool]) -> "CostLine":
        """The line of the sizes for which `is_settled` holds; of all sizes if it holds for none."""
        twin = CostLine(self._is_proportional)
        twin.costs = {key: cost for key, cost in self.costs.items() if is_settled(cost)} or self.costs
        return twin

    def copy(self) -> "CostLine":
        twin = CostLine(self._is_proportional)
        twin.costs, twin._samples = dict(self.costs), dict(self._samples)
        return twin
