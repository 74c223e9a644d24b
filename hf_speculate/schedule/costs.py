"""How many seconds a round of K drafts takes, from the rounds so far."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from hf_speculate.schedule.base import RoundOutcome

_NUM_SAMPLES = 5  # newest rounds of one kind that count
_FEW_FED = 2  # tokens that the drafter reads in a round that follows a drafted one
_MANY_ROWS = 16  # query rows from which CPUs take float32 products through their matrix kernels
_FIRST_SAMPLE_BOUND = 1.5  # a kind of round seen once is not believed to cost more than so many times what was foretold


class CostModel:
    """Seconds of a round by rows B and drafted tokens K, as measured; foretold for kinds that were not run yet.

    What was measured counts by its lower median over the newest rounds, so one slow round (a first call, another
    process) does not stand. A foretold round is K draft steps and a verification whose time is interpolated over its
    B * (K + 1) query rows. Nothing is taken to grow with them: on CPUs in float32, 4 to 15 rows may cost more than 16.

    Args:
        draft_cost_ratio: seconds of a draft step over those of a plain step, for as long as nothing is measured.
    """

    def __init__(self, draft_cost_ratio: float):
        self._ratio = draft_cost_ratio
        self._verify_s: dict[tuple[int, int], deque[float]] = {}  # by (B, K): scoring and all that follows
        self._draft_s: dict[tuple[int, int], deque[float]] = {}  # by (B, K): rounds in which the drafter read little
        self._step_bound_s: float | None = None  # of a draft step, from rounds in which it read much

    def observe(self, outcome: RoundOutcome) -> None:
        """Note a round's seconds."""
        kind = outcome.num_rows, outcome.num_draft_tokens
        self._verify_s.setdefault(kind, deque(maxlen=_NUM_SAMPLES)).append(outcome.score_s + outcome.other_s)
        if outcome.num_draft_tokens == 0:
            return
        if outcome.num_fed <= _FEW_FED:
            self._draft_s.setdefault(kind, deque(maxlen=_NUM_SAMPLES)).append(outcome.draft_s)
        else:
            bound = outcome.draft_s / outcome.num_draft_tokens
            self._step_bound_s = bound if self._step_bound_s is None else min(self._step_bound_s, bound)

    def num_samples(self, num_rows: int, num_draft_tokens: int) -> int:
        """Rounds of this kind, 0..5."""
        return len(self._verify_s.get((num_rows, num_draft_tokens), ()))

    def is_doubtful(self, num_rows: int, num_draft_tokens: int) -> bool:
        """Whether rounds of this kind may be faster than what is foretold of them."""
        samples = self._verify_s.get((num_rows, num_draft_tokens), deque())
        if len(samples) != 1:
            return not samples
        return _interpolated(self._points(num_rows), num_rows * (num_draft_tokens + 1)) < samples[0]

    def rounds_s(self, num_rows: int, max_draft_tokens: int) -> list[float]:
        """[K_max + 1] seconds of a round of `num_rows` rows by K; without any measurement, in plain steps."""
        points = self._points(num_rows)
        step_s = self._step_s(num_rows, points)
        seconds = []
        for num in range(max_draft_tokens + 1):
            kind = num_rows, num
            draft_s = _middle(self._draft_s[kind]) if kind in self._draft_s else num * step_s
            seconds.append(draft_s + _interpolated(points, num_rows * (num + 1)))
        return seconds

    def best_case_s(self, num_rows: int, max_draft_tokens: int) -> list[float]:
        """[K_max + 1] the least seconds that a round may take: its verification as fast as one that was measured.

        Between two measured ones that is the faster of them. Past the largest it is that one, but from 16 query rows
        on, where matrix kernels of CPUs change, the fastest of all.
        """
        points = self._points(num_rows)
        step_s = self._step_s(num_rows, points)
        least_s = min((value for _, value in points), default=1.0)
        seconds = []
        for num in range(max_draft_tokens + 1):
            num_query = num_rows * (num + 1)
            right = bisect_left(points, (num_query, float("-inf")))
            verify_s = least_s
            if 0 < right < len(points):
                verify_s = min(points[right - 1][1], points[right][1])
            elif right and num_query < _MANY_ROWS:
                verify_s = points[-1][1]
            seconds.append(num * step_s + verify_s)
        return seconds

    def _points(self, num_rows: int) -> list[tuple[int, float]]:
        """(query rows, seconds) of what was measured, sorted; where several kinds agree, `num_rows` rows win.

        Kinds that were run once count bounded by the others, for as long as there are others.
        """
        found: dict[int, float] = {}
        for is_own in (False, True):
            for (rows, num), samples in self._verify_s.items():
                if (rows == num_rows) is is_own and len(samples) > 1:
                    found[rows * (num + 1)] = _middle(samples)
        firm = sorted(found.items())
        for (rows, num), samples in self._verify_s.items():
            place = rows * (num + 1)
            if len(samples) == 1 and (rows == num_rows or place not in found):
                bound = _FIRST_SAMPLE_BOUND if num else 1.0  # a slow first plain step must not keep bad drafts going
                found[place] = min(samples[0], bound * _interpolated(firm, place)) if firm else samples[0]
        return sorted(found.items())

    def _step_s(self, num_rows: int, points: list[tuple[int, float]]) -> float:
        """Of the nearest number of rows; before any round of its own, from the models' sizes."""
        if self._draft_s:
            nearest = min(abs(rows - num_rows) for rows, _ in self._draft_s)
            steps = [
                sample / num
                for (rows, num), samples in self._draft_s.items()
                if abs(rows - num_rows) == nearest
                for sample in samples
            ]
            return _middle(steps)
        step_s = self._ratio * (points[0][1] if points else 1.0)
        return step_s if self._step_bound_s is None else min(step_s, self._step_bound_s)


def _middle(values: Sequence[float]) -> float:
    """The lower median."""
    return sorted(values)[(len(values) - 1) // 2]


def _interpolated(points: list[tuple[int, float]], place: int) -> float:
    """Straight lines between points, flat beyond them; 1 without any."""
    if not points:
        return 1.0
    right = bisect_left(points, (place, float("-inf")))
    if right == len(points):
        return points[-1][1]
    if right == 0 or points[right][0] == place:
        return points[right][1]
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (place - x0) / (x1 - x0)
