"""The cost model: how many seconds a round of K drafts takes."""

import copy
import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from operator import add, mul
from statistics import median_low
from typing import NamedTuple

from hf_speculate.schedule.base import RoundOutcome

_NUM_SAMPLES = 24  # newest rounds of one kind that are kept
_MOST_TIMES = 3.0  # the expected seconds that a sample counts as; a pause of the process may take a hundred times
_ESTIMATE_EVERY = 6  # drafted rounds of kinds that were measured before; to estimate takes 1 % of a small model's round
_FEW_FED = 2  # tokens that the drafter reads in a round that follows a drafted one
_ALIKE = 2.0  # factor in the number of rows within which plain steps of one count serve for another
_BANDWIDTH = 0.3  # of the logarithm of a size, within which one kind says much about another
_OTHER_WEIGHT = 0.1  # of the residual of another size, at most
_NOISE = 0.025  # share of a round's seconds; half as much or twice as much loses 1 % where some sizes are slow
_LEAST_SHARE = 0.25  # of the line's seconds that an estimate is at least
_FADE = 0.99  # of a kind's weight, for every drafted round by which another kind is newer
_LEAST_VARIANCE = 1e-9  # of sizes, below which they are equal but for rounding
_TINY = 1e-18  # keeps a division from failing if all kinds lie on the line, or the clock is too coarse

_Key = tuple[int, int]  # rows, and the size that seconds grow with


class _Kind(NamedTuple):
    """Seconds of the newest rounds of one kind."""

    num_samples: int
    median_s: float
    newest: int  # drafted rounds before the newest of these


@lru_cache(1024)
def _likeness(size: int, other: int) -> float:
    return 1 / (1 + (math.log(size / other) / _BANDWIDTH) ** 4)


@lru_cache(64)
def _likenesses(sizes: Sequence[int], keys: tuple[_Key, ...]) -> list[list[float]]:
    """[M][N] likeness of N kinds to each of M sizes."""
    return [[1.0 if size == other else _OTHER_WEIGHT * _likeness(size, other) for _, other in keys] for size in sizes]


class _CostLine:
    """Seconds by size: a line fitted to the kinds of rounds, plus the residuals of kinds of about that size."""

    def __init__(self, is_proportional: bool = False) -> None:
        self.kinds: dict[_Key, _Kind] = {}
        self._is_proportional = is_proportional  # until two sizes were measured; otherwise constant
        self._samples: dict[_Key, tuple[float, ...]] = {}

    def add(self, rows: int, size: int, seconds: float, num_drafted: int) -> None:
        key = (rows, size)
        if self.kinds:
            expected_s = self.kinds[key].median_s if key in self.kinds else self.estimate(rows, (size,))[0]
            seconds = min(seconds, _MOST_TIMES * expected_s)
        samples = self._samples[key] = (*self._samples.get(key, ()), seconds)[-_NUM_SAMPLES:]
        self.kinds[key] = _Kind(len(samples), median_low(samples), num_drafted)

    def line(self, rows: int) -> tuple[float, float]:
        """Intercept and slope; kinds of other numbers of rows and older kinds weigh less."""
        return self._fit(self._weights(rows))

    def _fit(self, weights: list[float]) -> tuple[float, float]:
        """Intercept and slope of the weighted least-squares line."""
        sizes, medians = [size for _, size in self.kinds], [kind.median_s for kind in self.kinds.values()]
        total = sum(weights)
        mean_size, mean_s = sum(map(mul, weights, sizes)) / total, sum(map(mul, weights, medians)) / total
        distances = [size - mean_size for size in sizes]
        weighted = list(map(mul, weights, distances))
        variance = sum(map(mul, weighted, distances))
        steepest = mean_s / mean_size  # seconds are proportional to the size
        if variance <= _LEAST_VARIANCE * total:  # kinds of one size
            slope = steepest if self._is_proportional else 0.0
        else:
            slope = min(max(sum(map(mul, weighted, medians)) / variance, 0.0), steepest)
        return mean_s - slope * mean_size, slope

    def estimate(self, rows: int, sizes: Sequence[int]) -> list[float]:
        """[M] seconds for M sizes."""
        weights = self._weights(rows)
        intercept, slope = self._fit(weights)
        above = [kind.median_s - intercept - slope * size for (_, size), kind in self.kinds.items()]
        squares, total = sum(map(mul, weights, map(mul, above, above))), sum(weights)
        # The line counts as this many samples of a kind: more if the residuals of all kinds are small.
        noise_s = _NOISE * (intercept + slope * sum(size for _, size in self.kinds) / len(self.kinds))
        line_weight = noise_s**2 * total / max(squares, _TINY)
        weighted = list(map(mul, weights, above))
        seconds = []
        for size, likeness in zip(sizes, _likenesses(sizes, tuple(self.kinds)), strict=True):
            line_s = intercept + slope * size
            off_s = sum(map(mul, weighted, likeness)) / (sum(map(mul, weights, likeness)) + line_weight)
            seconds.append(max(line_s + off_s, _LEAST_SHARE * line_s))
        return seconds

    def _weights(self, rows: int) -> list[float]:
        """[N] of the kinds in the line of so many rows."""
        latest = max(kind.newest for kind in self.kinds.values())
        return [
            kind.num_samples * _FADE ** (latest - kind.newest) * _likeness(rows, others)
            for (others, _), kind in self.kinds.items()
        ]

    def medians(self) -> list[tuple[int, float]]:
        """Size and seconds of each kind."""
        return [(size, kind.median_s) for (_, size), kind in self.kinds.items()]

    def copy(self) -> "_CostLine":
        twin = _CostLine(self._is_proportional)
        twin.kinds, twin._samples = dict(self.kinds), dict(self._samples)
        return twin


class CostModel:
    """Seconds of a round by rows B and drafted tokens K, from measurements that vary by a fifth.

    A round is K draft steps and a verification. Single rounds are too noisy to compare. The seconds of a verification
    grow about linearly with its B * (K + 1) query rows, those of a draft with K, so a line is fitted to the medians of
    all kinds of rounds. Some sizes suit the hardware better, so the residuals of measured kinds are added, weighted by
    their samples. Plain steps take another path through the model and are kept apart.

    Args:
        draft_cost_ratio: seconds of a draft step over those of a plain step, until they are measured.
    """

    def __init__(self, draft_cost_ratio: float):
        self._ratio = draft_cost_ratio
        self._num_drafted = 0
        self._verify = _CostLine()  # by query rows: scoring and all that follows
        self._plain = _CostLine()  # by B
        self._draft = _CostLine(is_proportional=True)  # by B and K, from rounds in which the drafter read little
        self._step_bound_s: float | None = None  # of a draft's step, from rounds in which it read much
        self._known_s: dict[tuple[int, int], list[float]] = {}  # results of `rounds_s` that still count

    def observe(self, outcome: RoundOutcome) -> None:
        """Add a round's seconds."""
        num_rows, num, verify_s = outcome.num_rows, outcome.num_draft_tokens, outcome.score_s + outcome.other_s
        if num == 0:
            self._known_s.clear()
            self._plain.add(1, num_rows, verify_s, self._num_drafted)
            return
        if not self.is_tried(num_rows, num) or self._num_drafted % _ESTIMATE_EVERY == 0:
            self._known_s.clear()
        self._num_drafted += 1
        self._verify.add(1, num_rows * (num + 1), verify_s, self._num_drafted)
        if outcome.num_fed <= _FEW_FED:
            self._draft.add(num_rows, num, outcome.draft_s, self._num_drafted)
        else:
            step_s = outcome.draft_s / num
            self._step_bound_s = step_s if self._step_bound_s is None else min(self._step_bound_s, step_s)

    def copy(self) -> "CostModel":
        """A model that learns apart from this one."""
        twin = copy.copy(self)
        twin._verify, twin._plain, twin._draft = self._verify.copy(), self._plain.copy(), self._draft.copy()
        twin._known_s = dict(self._known_s)
        return twin

    def num_plain_samples(self, num_rows: int) -> int:
        """The number of plain steps measured with about this many rows."""
        kind = self._nearest_plain(num_rows)
        return kind.num_samples if kind else 0

    def plain_age(self, num_rows: int) -> int:
        """Drafted rounds since a plain step of about this many rows; 0 if none was measured."""
        kind = self._nearest_plain(num_rows)
        return self._num_drafted - kind.newest if kind else 0

    @property
    def num_kinds(self) -> int:
        """The number of sizes of verifications that were measured."""
        return len(self._verify.kinds)

    def is_tried(self, num_rows: int, num_draft_tokens: int) -> bool:
        """Whether a verification of as many query rows was measured."""
        return (1, num_rows * (num_draft_tokens + 1)) in self._verify.kinds

    def rounds_s(self, num_rows: int, max_draft_tokens: int) -> list[float]:
        """[K_max + 1] seconds of a round of `num_rows` rows by K; in units of a plain step before any measurement."""
        if (num_rows, max_draft_tokens) in self._known_s:
            return self._known_s[num_rows, max_draft_tokens]
        plain_s, drafts_s = self._plain_s(num_rows), self._drafts_s(num_rows, max_draft_tokens)
        sizes = range(2 * num_rows, (max_draft_tokens + 1) * num_rows + 1, num_rows)
        verify_s = self._verify.estimate(1, sizes) if self._verify.kinds else [plain_s] * max_draft_tokens
        seconds = self._known_s[num_rows, max_draft_tokens] = [plain_s, *map(add, drafts_s, verify_s)]
        return seconds

    def best_case_s(self, num_rows: int, max_draft_tokens: int) -> list[float]:
        """[K_max + 1] optimistic seconds of a round.

        Its verification lies below the line as far as any did, but takes no less than those of the measured sizes next
        to it, a plain step among them.
        """
        if not self._verify.kinds:
            return self.rounds_s(num_rows, max_draft_tokens)
        intercept, slope = self._verify.line(1)
        plain_s = self._plain_s(num_rows)
        measured = sorted([(num_rows, plain_s), *self._verify.medians()])
        share = min(seconds / max(intercept + slope * size, _TINY) for size, seconds in measured)
        best_s = [plain_s]
        for num, draft_s in enumerate(self._drafts_s(num_rows, max_draft_tokens), start=1):
            size = num_rows * (num + 1)
            right = bisect_left(measured, (size,))
            near_s = min(seconds for _, seconds in measured[right - 1 : right + 1]) if right < len(measured) else 0.0
            best_s.append(draft_s + max(share * (intercept + slope * size), near_s))
        return best_s

    def _drafts_s(self, num_rows: int, max_draft_tokens: int) -> list[float]:
        """[K_max] seconds of a draft by K >= 1; before any drafted round, from the models' sizes."""
        nums = range(1, max_draft_tokens + 1)
        if self._draft.kinds:
            return self._draft.estimate(num_rows, nums)
        step_s = self._ratio * self._plain_s(num_rows)
        step_s = step_s if self._step_bound_s is None else min(step_s, self._step_bound_s)
        return [num * step_s for num in nums]

    def _nearest_plain(self, num_rows: int) -> _Kind | None:
        near = [
            (abs(rows - num_rows), kind)
            for (_, rows), kind in self._plain.kinds.items()
            if max(rows, num_rows) <= _ALIKE * min(rows, num_rows)
        ]
        return min(near, default=(0, None))[1]

    def _plain_s(self, num_rows: int) -> float:
        """Before any plain step, the estimate of a verification of as many rows."""
        kind = self._nearest_plain(num_rows)
        if kind is not None:
            return kind.median_s
        return self._verify.estimate(1, (num_rows,))[0] if self._verify.kinds else 1.0
