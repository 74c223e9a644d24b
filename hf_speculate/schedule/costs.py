"""How many seconds a round of K drafts takes, from the rounds so far."""

import functools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

from hf_speculate.schedule.base import RoundOutcome

_NUM_SAMPLES = 12  # newest rounds of one kind that count
_NUM_RECENT = 4  # of which a later call is told
_FEW_FED = 2  # tokens that the drafter reads in a round that follows a drafted one
_MANY_ROWS = 16  # query rows from which CPUs take float32 products through their matrix kernels
_ALIKE = 2.0  # factor in the number of rows within which plain steps stand for one another
_OTHER_WEIGHT = 0.4  # of a round of another kind, at most
_BANDWIDTH = 0.3  # of the logarithm of query rows, within which kinds tell much of one another
_FADE = 0.95  # of a kind's weight with every drafted round by which another is newer


class _Kind:
    """The newest rounds of one number of rows and one K."""

    def __init__(self) -> None:
        self.samples: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self.newest = 0  # drafted rounds until then
        self.median = 0.0

    def add(self, seconds: float, place: int) -> None:
        self.samples.append(seconds)
        self.median = _middle(self.samples)
        self.newest = place

    def recent(self) -> "_Kind":
        """The newest of the newest."""
        kind = _Kind()
        kind.samples.extend(list(self.samples)[-_NUM_RECENT:])
        kind.median, kind.newest = _middle(kind.samples), self.newest
        return kind


class CostModel:
    """Seconds of a round by rows B and drafted tokens K, from measurements that vary by a fifth.

    A round is K draft steps and a verification. Single rounds are too noisy to be compared, so a verification's time
    is the mean over all kinds of rounds, of the medians over their newest, in which the same kind weighs most and
    others the less, the further their B * (K + 1) query rows are. Nothing is taken to grow: on CPUs in float32, 4 to
    15 rows may cost more than 16. Plain steps take another path through the model and count by themselves.

    Args:
        draft_cost_ratio: seconds of a draft step over those of a plain step, for as long as nothing is measured.
    """

    def __init__(self, draft_cost_ratio: float):
        self._ratio = draft_cost_ratio
        self._num_drafted = 0
        self._verify: dict[tuple[int, int], _Kind] = {}  # by (B, K >= 1): scoring and all that follows
        self._plain: dict[int, _Kind] = {}  # by B
        self._step: dict[int, _Kind] = {}  # by B: of a draft's steps, from rounds in which the drafter read little
        self._step_bound_s: float | None = None  # of a draft's step, from rounds in which it read much
        self._known_s: dict[tuple[int, int], list[float]] = {}  # what `rounds_s` said since the newest round

    def recent(self) -> "CostModel":
        """A copy to go on from, in which newer rounds soon count for more."""
        copy = CostModel(self._ratio)
        copy._num_drafted, copy._step_bound_s = self._num_drafted, self._step_bound_s
        copy._verify = {key: kind.recent() for key, kind in self._verify.items()}
        copy._plain = {num_rows: kind.recent() for num_rows, kind in self._plain.items()}
        copy._step = {num_rows: kind.recent() for num_rows, kind in self._step.items()}
        return copy

    def observe(self, outcome: RoundOutcome) -> None:
        """Note a round's seconds."""
        self._known_s.clear()
        num_rows, num, verify_s = outcome.num_rows, outcome.num_draft_tokens, outcome.score_s + outcome.other_s
        if num == 0:
            self._plain.setdefault(num_rows, _Kind()).add(verify_s, self._num_drafted)
            return
        self._num_drafted += 1
        self._verify.setdefault((num_rows, num), _Kind()).add(verify_s, self._num_drafted)
        step_s = outcome.draft_s / num
        if outcome.num_fed <= _FEW_FED:
            self._step.setdefault(num_rows, _Kind()).add(step_s, self._num_drafted)
        else:
            self._step_bound_s = step_s if self._step_bound_s is None else min(self._step_bound_s, step_s)

    def num_plain_samples(self, num_rows: int) -> int:
        """Plain steps that tell how long one of this many rows takes."""
        kind = self._nearest_plain(num_rows)
        return len(kind.samples) if kind else 0

    def plain_age(self, num_rows: int) -> int:
        """Drafted rounds since a plain step of about this many rows; 0 where none was measured."""
        kind = self._nearest_plain(num_rows)
        return self._num_drafted - kind.newest if kind else 0

    def is_tried(self, num_rows: int, num_draft_tokens: int) -> bool:
        """Whether a round of this kind was run."""
        return (num_rows, num_draft_tokens) in self._verify

    def rounds_s(self, num_rows: int, max_draft_tokens: int) -> list[float]:
        """[K_max + 1] seconds of a round of `num_rows` rows by K; without any measurement, in plain steps."""
        seconds = self._known_s.get((num_rows, max_draft_tokens))
        if seconds is None:
            step_s = self._step_s(num_rows)
            verify_s = [self._verify_s(num_rows, num) for num in range(1, max_draft_tokens + 1)]
            seconds = [self._plain_s(num_rows), *(num * step_s + spent for num, spent in enumerate(verify_s, 1))]
            self._known_s[num_rows, max_draft_tokens] = seconds
        return seconds

    def best_case_s(self, num_rows: int, max_draft_tokens: int) -> list[float]:
        """[K_max + 1] the least seconds that a round may take: its verification as fast as one that was measured.

        Between two measured ones that is the faster of them. Past the largest it is that one, but from 16 query rows
        on, where matrix kernels of CPUs change, the fastest of all.
        """
        step_s = self._step_s(num_rows)
        seen = {num_rows: self._plain_s(num_rows)}
        for rows, num in self._verify:
            seen.setdefault(rows * (num + 1), self._verify_s(rows, num))
        points = sorted(seen.items())
        least_s = min(seen.values())
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

    def _nearest_plain(self, num_rows: int) -> _Kind | None:
        near = [rows for rows in self._plain if max(rows, num_rows) <= _ALIKE * min(rows, num_rows)]
        return self._plain[min(near, key=lambda rows: abs(rows - num_rows))] if near else None

    def _plain_s(self, num_rows: int) -> float:
        """Before any plain step, as long as the verification of as many rows."""
        kind = self._nearest_plain(num_rows)
        if kind is None:
            return self._verify_s(num_rows, 0) if self._verify else 1.0
        return kind.median

    def _verify_s(self, num_rows: int, num_draft_tokens: int) -> float:
        if not self._verify:
            return self._plain_s(num_rows)
        num_query = num_rows * (num_draft_tokens + 1)
        return self._mean(num_query, ((rows * (num + 1), kind) for (rows, num), kind in self._verify.items()))

    def _step_s(self, num_rows: int) -> float:
        """Of a draft's step; before any round of its own, from the models' sizes."""
        if self._step:
            return self._mean(num_rows, self._step.items())
        step_s = self._ratio * self._plain_s(num_rows)
        return step_s if self._step_bound_s is None else min(step_s, self._step_bound_s)

    @staticmethod
    def _mean(num_query: int, kinds: Iterable[tuple[int, _Kind]]) -> float:
        """Of the medians of kinds that are given by their query rows; a kind fades as newer ones come."""
        found = list(kinds)
        newest = max(kind.newest for _, kind in found)
        weights, total = 0.0, 0.0
        for other, kind in found:
            weight = len(kind.samples) * _likeness(num_query, other) * _FADE ** (newest - kind.newest)
            weights += weight
            total += weight * kind.median
        return total / weights


@functools.lru_cache(maxsize=4096)
def _likeness(num_query: int, other: int) -> float:
    """How much a kind of `other` query rows tells of one of `num_query`."""
    if num_query == other:
        return 1.0
    return _OTHER_WEIGHT / (1 + (math.log(num_query / other) / _BANDWIDTH) ** 4)


def _middle(values: Sequence[float]) -> float:
    """The lower median."""
    return sorted(values)[(len(values) - 1) // 2]
