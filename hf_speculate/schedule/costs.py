"""The cost model: how many seconds a round of K drafts takes."""

import copy
from bisect import bisect_left
from collections.abc import Hashable
from statistics import median_low
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from hf_speculate.schedule.acceptance import Floats
from hf_speculate.schedule.base import RoundOutcome

_NUM_SAMPLES = 24  # newest rounds of one kind that are kept
_MOST_TIMES = 3.0  # the expected seconds that a sample counts as; a pause of the process may take a hundred times
_ESTIMATE_EVERY = 4  # drafted rounds of kinds that were measured before; to estimate takes 1 % of a small model's round
_FEW_FED = 2  # tokens that the drafter reads in a round that follows a drafted one
_ALIKE = 2.0  # factor in the number of rows within which plain steps of one count serve for another
_OTHER_WEIGHT = 0.4  # of a round of another kind, at most
_BANDWIDTH = 0.3  # of the logarithm of query rows, within which one kind says much about another
_FADE = 0.99  # of a kind's weight, for every drafted round by which another kind is newer


class _Kind(NamedTuple):
    """Seconds of the newest rounds of one kind."""

    num_query: float  # query rows
    num_samples: float
    median_s: float
    newest: float  # drafted rounds before the newest of these


class _Kinds:
    """Seconds of rounds by kind, such as B or (B, K)."""

    def __init__(self) -> None:
        self._samples: dict[Hashable, tuple[float, ...]] = {}
        self._places: dict[Hashable, int] = {}
        self.table = np.empty((0, len(_Kind._fields)))  # [N, 4], a `_Kind` by place

    def __contains__(self, kind: Hashable) -> bool:
        return kind in self._places

    def add(self, kind: Hashable, num_query: int, seconds: float, num_drafted: int) -> None:
        if kind in self._places:
            seconds = min(seconds, _MOST_TIMES * _Kind(*self.table[self._places[kind]]).median_s)
        elif len(self.table):
            seconds = min(seconds, _MOST_TIMES * float(self.mean([num_query])[0]))
        samples = self._samples[kind] = (*self._samples.get(kind, ()), seconds)[-_NUM_SAMPLES:]
        if kind not in self._places:
            self._places[kind] = len(self._places)
            self.table = np.vstack([self.table, np.empty(self.table.shape[1])])
        self.table[self._places[kind]] = _Kind(num_query, len(samples), median_low(samples), num_drafted)

    def mean(self, num_query: ArrayLike) -> Floats:
        """[M] weighted means of all medians for [M] numbers of query rows; unlike and older kinds weigh less."""
        of_kinds, num_samples, medians, newest = self.table.T
        distances = (np.log(num_query)[:, None] - np.log(of_kinds)) / _BANDWIDTH  # [M, N]
        likeness = np.where(distances == 0, 1.0, _OTHER_WEIGHT / (1 + np.square(np.square(distances))))
        weights = num_samples * _FADE ** (newest.max() - newest) * likeness
        means: Floats = weights @ medians / weights.sum(axis=1)
        return means

    def copy(self) -> "_Kinds":
        twin = _Kinds()
        twin._samples, twin._places, twin.table = dict(self._samples), dict(self._places), self.table.copy()
        return twin


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
        self._verify = _Kinds()  # by (B, K >= 1): scoring and all that follows
        self._plain = _Kinds()  # by B
        self._step = _Kinds()  # by B: of a draft's steps, from rounds in which the drafter read little
        self._step_bound_s: float | None = None  # of a draft's step, from rounds in which it read much
        self._known_s: dict[tuple[int, int], Floats] = {}  # results of `rounds_s` that still count

    def observe(self, outcome: RoundOutcome) -> None:
        """Add a round's seconds."""
        num_rows, num, verify_s = outcome.num_rows, outcome.num_draft_tokens, outcome.score_s + outcome.other_s
        if num == 0 or (num_rows, num) not in self._verify or self._num_drafted % _ESTIMATE_EVERY == 0:
            self._known_s.clear()
        if num == 0:
            self._plain.add(num_rows, num_rows, verify_s, self._num_drafted)
            return
        self._num_drafted += 1
        self._verify.add((num_rows, num), num_rows * (num + 1), verify_s, self._num_drafted)
        step_s = outcome.draft_s / num
        if outcome.num_fed <= _FEW_FED:
            self._step.add(num_rows, num_rows, step_s, self._num_drafted)
        else:
            self._step_bound_s = step_s if self._step_bound_s is None else min(self._step_bound_s, step_s)

    def copy(self) -> "CostModel":
        """A model that learns apart from this one."""
        twin = copy.copy(self)
        twin._verify, twin._plain, twin._step = self._verify.copy(), self._plain.copy(), self._step.copy()
        twin._known_s = {}
        return twin

    def num_plain_samples(self, num_rows: int) -> int:
        """The number of plain steps measured with about this many rows."""
        kind = self._nearest_plain(num_rows)
        return int(kind.num_samples) if kind else 0

    def plain_age(self, num_rows: int) -> int:
        """Drafted rounds since a plain step of about this many rows; 0 if none was measured."""
        kind = self._nearest_plain(num_rows)
        return self._num_drafted - int(kind.newest) if kind else 0

    @property
    def num_kinds(self) -> int:
        """The number of pairs of B and K that were measured."""
        return len(self._verify.table)

    def is_tried(self, num_rows: int, num_draft_tokens: int) -> bool:
        """Whether a round with these B and K was run."""
        return (num_rows, num_draft_tokens) in self._verify

    def rounds_s(self, num_rows: int, max_draft_tokens: int) -> Floats:
        """[K_max + 1] seconds of a round of `num_rows` rows by K; in units of a plain step before any measurement."""
        if (num_rows, max_draft_tokens) in self._known_s:
            return self._known_s[num_rows, max_draft_tokens]
        seconds = np.full(max_draft_tokens + 1, self._plain_s(num_rows))
        nums = np.arange(1, max_draft_tokens + 1)
        if len(self._verify.table):
            seconds[1:] = self._verify.mean(num_rows * (nums + 1))
        seconds[1:] += nums * self._step_s(num_rows)
        self._known_s[num_rows, max_draft_tokens] = seconds
        return seconds

    def best_case_s(self, num_rows: int, max_draft_tokens: int) -> Floats:
        """[K_max + 1] optimistic seconds of a round: its verification takes as long as a measured one near it.

        Between two measured numbers of query rows that is the faster of the two, past the largest the fastest of all.
        """
        sizes = sorted({*self._verify.table[:, 0].tolist(), num_rows})
        seen_s = self._verify.mean(sizes).tolist() if len(self._verify.table) else [0.0]
        seen_s[sizes.index(num_rows)] = self._plain_s(num_rows)
        step_s, least_s, seconds = self._step_s(num_rows), min(seen_s), []
        for num in range(max_draft_tokens + 1):
            right = bisect_left(sizes, num_rows * (num + 1))
            near_s = min(seen_s[right - 1 : right + 1]) if 0 < right < len(sizes) else least_s
            seconds.append(num * step_s + near_s)
        return np.array(seconds)

    def _nearest_plain(self, num_rows: int) -> _Kind | None:
        kinds = [_Kind(*kind) for kind in self._plain.table.tolist()]
        near = [kind for kind in kinds if max(kind.num_query, num_rows) <= _ALIKE * min(kind.num_query, num_rows)]
        return min(near, key=lambda kind: abs(kind.num_query - num_rows), default=None)

    def _plain_s(self, num_rows: int) -> float:
        """Before any plain step, the estimate of a verification of as many rows."""
        kind = self._nearest_plain(num_rows)
        if kind is not None:
            return kind.median_s
        return float(self._verify.mean([num_rows])[0]) if len(self._verify.table) else 1.0

    def _step_s(self, num_rows: int) -> float:
        """Seconds of a draft step; before any drafted round, from the models' sizes."""
        if len(self._step.table):
            return float(self._step.mean([num_rows])[0])
        step_s = self._ratio * self._plain_s(num_rows)
        return step_s if self._step_bound_s is None else min(step_s, self._step_bound_s)
