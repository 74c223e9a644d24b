"""The cost model: how many seconds a round of K drafts takes."""

import functools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from statistics import median_low

from hf_speculate.schedule.base import RoundOutcome

_NUM_SAMPLES = 12  # newest rounds of one kind that are kept
_FEW_FED = 2  # tokens that the drafter reads in a round that follows a drafted one
_ALIKE = 2.0  # factor in the number of rows within which plain steps of one count serve for another
_OTHER_WEIGHT = 0.4  # of a round of another kind, at most
_BANDWIDTH = 0.3  # of the logarithm of query rows, within which one kind says much about another
_FADE = 0.99  # of a kind's weight, for every drafted round by which another kind is newer


class _Kind:
    """Seconds of the newest rounds with one number of rows and one K."""

    def __init__(self) -> None:
        self.samples: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self.newest = 0  # drafted rounds until then
        self.median = 0.0

    def add(self, seconds: float, num_drafted: int) -> None:
        self.samples.append(seconds)
        self.median = median_low(self.samples)
        self.newest = num_drafted


class CostModel:
    """Seconds of a round by rows B and drafted tokens K, from measurements that vary by a fifth.

    A round is K draft steps and a verification. Single rounds are too noisy to compare, so the estimate for a
    verification is a weighted mean of the medians of all kinds of rounds: the same kind weighs most, other kinds less
    the further away their B * (K + 1) query rows are. The model does not assume that cost grows with rows: on CPUs in
    float32, 4 to 15 rows may cost more than 16. Plain steps take another path through the model and are kept apart.

    Args:
        draft_cost_ratio: seconds of a draft step over those of a plain step, until they are measured.
    """

    def __init__(self, draft_cost_ratio: float):
        self._ratio = draft_cost_ratio
        self._num_drafted = 0
        self._verify: dict[tuple[int, int], _Kind] = {}  # by (B, K >= 1): scoring and all that follows
        self._plain: dict[int, _Kind] = {}  # by B
        self._step: dict[int, _Kind] = {}  # by B: of a draft's steps, from rounds in which the drafter read little
        self._step_bound_s: float | None = None  # of a draft's step, from rounds in which it read much
        self._known_s: dict[tuple[int, int], list[float]] = {}  # results of `rounds_s` since the newest round

    def observe(self, outcome: RoundOutcome) -> None:
        """Add a round's seconds."""
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
        """The number of plain steps measured with about this many rows."""
        kind = self._nearest_plain(num_rows)
        return len(kind.samples) if kind else 0

    def plain_age(self, num_rows: int) -> int:
        """Drafted rounds since a plain step of about this many rows; 0 if none was measured."""
        kind = self._nearest_plain(num_rows)
        return self._num_drafted - kind.newest if kind else 0

    def is_tried(self, num_rows: int, num_draft_tokens: int) -> bool:
        """Whether a round with these B and K was run."""
        return (num_rows, num_draft_tokens) in self._verify

    def rounds_s(self, num_rows: int, max_draft_tokens: int) -> list[float]:
        """[K_max + 1] seconds of a round of `num_rows` rows by K; in units of a plain step before any measurement."""
        seconds = self._known_s.get((num_rows, max_draft_tokens))
        if seconds is None:
            step_s = self._step_s(num_rows)
            verify_s = [self._verify_s(num_rows, num) for num in range(1, max_draft_tokens + 1)]
            seconds = [self._plain_s(num_rows), *(num * step_s + spent for num, spent in enumerate(verify_s, 1))]
            self._known_s[num_rows, max_draft_tokens] = seconds
        return seconds

    def best_case_s(self, num_rows: int, max_draft_tokens: int) -> list[float]:
        """[K_max + 1] optimistic seconds of a round: its verification takes as long as a measured one near it.

        Between two measured numbers of query rows that is the faster of the two, past the largest the fastest of all.
        """
        step_s = self._step_s(num_rows)
        seen = {num_rows: self._plain_s(num_rows)}
        for rows, num in self._verify:
            seen.setdefault(rows * (num + 1), self._verify_s(rows, num))
        sizes, seconds = sorted(seen), []
        for num in range(max_draft_tokens + 1):
            right = bisect_left(sizes, num_rows * (num + 1))
            near = sizes[right - 1 : right + 1] if 0 < right < len(sizes) else sizes
            seconds.append(num * step_s + min(seen[size] for size in near))
        return seconds

    def _nearest_plain(self, num_rows: int) -> _Kind | None:
        near = [rows for rows in self._plain if max(rows, num_rows) <= _ALIKE * min(rows, num_rows)]
        return self._plain[min(near, key=lambda rows: abs(rows - num_rows))] if near else None

    def _plain_s(self, num_rows: int) -> float:
        """Before any plain step, the estimate of a verification of as many rows."""
        kind = self._nearest_plain(num_rows)
        if kind is not None:
            return kind.median
        return self._verify_s(num_rows, 0) if self._verify else 1.0

    def _verify_s(self, num_rows: int, num_draft_tokens: int) -> float:
        if not self._verify:
            return self._plain_s(num_rows)
        num_query = num_rows * (num_draft_tokens + 1)
        return self._mean(num_query, ((rows * (num + 1), kind) for (rows, num), kind in self._verify.items()))

    def _step_s(self, num_rows: int) -> float:
        """Seconds of a draft step; before any drafted round, from the models' sizes."""
        if self._step:
            return self._mean(num_rows, self._step.items())
        step_s = self._ratio * self._plain_s(num_rows)
        return step_s if self._step_bound_s is None else min(step_s, self._step_bound_s)

    @staticmethod
    def _mean(num_query: int, kinds: Iterable[tuple[int, _Kind]]) -> float:
        """The weighted mean of the medians of `kinds`, pairs of query rows and kind; older kinds weigh less."""
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
    """Weight of a kind with `other` query rows in the estimate for `num_query` query rows."""
    if num_query == other:
        return 1.0
    return _OTHER_WEIGHT / (1 + (math.log(num_query / other) / _BANDWIDTH) ** 4)
