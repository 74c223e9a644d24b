"""Plain steps: the seconds of a round without drafts, by its number of rows."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median_low

import numpy as np

_NUM_SAMPLES = 16  # newest steps of one number of rows that are kept
_NUM_FRESH = 2  # samples that are kept if the next step comes long after
_LEAST_SAMPLES = 2  # steps that a mean is made of
_ALONE = 0.7  # share of its seconds that a single step counts as where too long a step would be expensive
_PAUSE = 1.3  # times the median above which a step is left out: the process paused, or it was the first of its size
_NUM_CHANGED = 3  # steps in a row that differ by as much, after which those before them count no more
_ALIKE = 2.0  # factor in the number of rows within which the steps of one number serve for another
_STALE = 200  # drafted rounds, including those of earlier calls, after which a step is measured again


class PlainSteps:
    """The mean seconds of measured plain steps, on a line between two numbers of rows."""

    def __init__(self) -> None:
        self._samples: dict[int, tuple[float, ...]] = {}
        self._num_own: dict[int, int] = {}  # steps of this call, and not of earlier ones
        self._newest: dict[int, int] = {}  # drafted rounds before the newest step
        self._means: dict[int, float] = {}
        self._counted: dict[int, float] = {}  # the same, but less for a number of rows with a single step
        self._known: dict[tuple[int, int], bool] = {}  # results of `is_known` since the last step

    def add(self, num_rows: int, seconds: float, num_drafted: int) -> None:
        """Add a step, which `num_drafted` drafted rounds came before."""
        samples = self._samples.get(num_rows, ())
        kept = _NUM_SAMPLES - 1 if num_drafted - self._newest.get(num_rows, 0) <= _STALE else _NUM_FRESH
        samples = (*samples[-kept:], seconds)
        if _has_changed(samples):
            samples = samples[-_NUM_CHANGED:]
        self._samples[num_rows] = samples
        self._newest[num_rows] = num_drafted
        self._num_own[num_rows] = self._num_own.get(num_rows, 0) + 1
        self._known.clear()
        longest = _PAUSE * median_low(samples)
        usual = [sample for sample in samples if sample <= longest]
        self._means[num_rows] = mean = sum(usual) / len(usual)
        self._counted[num_rows] = mean if len(samples) >= _LEAST_SAMPLES else _ALONE * mean

    @property
    def is_measured(self) -> bool:
        return bool(self._means)

    def seconds(self, num_rows: int) -> float | None:
        """The mean; None before the first step."""
        return _between(self._means, num_rows) if self._means else None

    def counted_s(self, num_rows: int) -> float | None:
        """p(n): the mean, but 0.7 of it after a single step; None before the first step."""
        return _between(self._counted, num_rows) if self._counted else None

    def least_row_s(self, num_rows: int) -> float:
        """The least by which p of at most `num_rows` rows falls for each row less; 0 if not known."""
        counted = sorted(self._counted.items())
        if not counted or counted[0][0] > 1 or counted[-1][0] < num_rows:
            return 0.0
        slopes = [(after_s - before_s) / (after - before) for (before, before_s), (after, after_s) in pairwise(counted)]
        return max(min([counted[0][1], *slopes]), 0.0)

    def is_known(self, num_rows: int, num_samples: int = _LEAST_SAMPLES) -> bool:
        """Whether so many steps of about `num_rows` rows, or of both more and fewer, were measured."""
        key = num_rows, num_samples
        if key not in self._known:
            measured = [rows for rows, samples in self._samples.items() if len(samples) >= num_samples]
            is_near = any(max(rows, num_rows) <= _ALIKE * min(rows, num_rows) for rows in measured)
            is_between = bool(measured) and min(measured) < num_rows < max(measured)
            self._known[key] = num_rows in measured or is_between or (is_near and num_rows > 1)
        return self._known[key]

    def is_stale(self, num_rows: int, num_drafted: int) -> bool:
        """Whether the nearest number of rows was last measured long ago, now that `num_drafted` rounds have drafted."""
        nearest = self._nearest(num_rows)
        return nearest is not None and num_drafted - self._newest[nearest] > _STALE

    def is_remembered(self, num_rows: int) -> bool:
        """Whether the nearest number of rows was measured in earlier calls alone: the speed may have changed since."""
        nearest = self._nearest(num_rows)
        return nearest is not None and self._num_own.get(nearest, 0) < _LEAST_SAMPLES

    def _nearest(self, num_rows: int) -> int | None:
        return min(self._newest, key=lambda rows: abs(rows - num_rows), default=None)

    def recent(self) -> "PlainSteps":
        """A copy for a later call, whose own steps soon outweigh these: the machine may be slower or faster by then."""
        twin = PlainSteps()
        for num_rows, samples in self._samples.items():
            twin._samples[num_rows] = (self._means[num_rows],) * min(len(samples), _LEAST_SAMPLES)
        twin._newest, twin._means, twin._counted = dict(self._newest), dict(self._means), dict(self._counted)
        return twin


def _has_changed(samples: Sequence[float]) -> bool:
    """Whether the newest steps are all slower, or all faster, than those before them: pauses come one by one."""
    before, newest = samples[:-_NUM_CHANGED], samples[-_NUM_CHANGED:]
    if not before:
        return False
    usual_s = median_low(before)
    return min(newest) > _PAUSE * usual_s or _PAUSE * max(newest) < usual_s


def _between(by_size: Mapping[int, float], size: int) -> float:
    """The value of a size, on a line between its two neighbours; outside of all sizes, that of the nearest."""
    if size in by_size:
        return by_size[size]
    sizes = sorted(by_size)
    return float(np.interp(size, sizes, [by_size[known] for known in sizes]))
