"""The cost model: how many seconds a round of K drafts takes."""

import copy
import math
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from functools import lru_cache
from operator import mul
from statistics import median_low
from typing import NamedTuple

from hf_speculate.schedule.base import RoundOutcome

_NUM_SAMPLES = 24  # newest rounds of one kind that are kept
_MOST_TIMES = 3.0  # the expected seconds that a sample counts as; a pause of the process may take a hundred times
_ESTIMATE_EVERY = 6  # drafted rounds of kinds that were measured before; to estimate takes 1 % of a small model's round
_FEW_FED = 2  # tokens that the drafter reads in a round that follows a drafted one
_ALIKE = 2.0  # factor in the number of rows within which plain steps of one count serve for another
_OTHER_WEIGHT = 0.4  # of a round of another kind, at most
_BANDWIDTH = 0.3  # of the logarithm of a size, within which one kind says much about another
_FADE = 0.99  # of a kind's weight, for every drafted round by which another kind is newer


_Sizes = tuple[int, ...]


class _Kind(NamedTuple):
    """Seconds of the newest rounds of one kind."""

    sizes: _Sizes  # that its seconds depend on
    num_samples: int
    median_s: float
    newest: int  # drafted rounds before the newest of these


@lru_cache(64)
def _likenesses(wanted: tuple[_Sizes, ...], kinds: tuple[_Sizes, ...]) -> list[list[float]]:
    """[M][N] weights of the N kinds in the estimate for each of M sizes, before samples and age are counted."""

    def likeness(sizes: _Sizes, other: _Sizes) -> float:
        if sizes == other:
            return 1.0
        distances = [math.log(size / of_other) / _BANDWIDTH for size, of_other in zip(sizes, other, strict=True)]
        return _OTHER_WEIGHT / math.prod(1 + distance**4 for distance in distances)

    return [[likeness(sizes, other) for other in kinds] for sizes in wanted]


class _Kinds:
    """Seconds of rounds by kind, such as B or (B, K)."""

    def __init__(self) -> None:
        self.summaries: dict[Hashable, _Kind] = {}
        self._samples: dict[Hashable, tuple[float, ...]] = {}

    def add(self, kind: Hashable, sizes: _Sizes, seconds: float, num_drafted: int) -> None:
        known = self.summaries.get(kind)
        if self.summaries:
            expected_s = known.median_s if known else self.mean([sizes])[0]
            seconds = min(seconds, _MOST_TIMES * expected_s)
        samples = self._samples[kind] = (*self._samples.get(kind, ()), seconds)[-_NUM_SAMPLES:]
        self.summaries[kind] = _Kind(sizes, len(samples), median_low(samples), num_drafted)

    def mean(self, sizes: Sequence[_Sizes]) -> list[float]:
        """[M] weighted means of all medians for the sizes of [M] kinds; unlike and older kinds weigh less."""
        of_kinds, num_samples, medians, newest = zip(*self.summaries.values(), strict=True)
        latest = max(newest)
        weights = [num * _FADE ** (latest - last) for num, last in zip(num_samples, newest, strict=True)]  # [N]
        weighted_s = list(map(mul, weights, medians))
        return [
            sum(map(mul, weighted_s, likeness)) / sum(map(mul, weights, likeness))
            for likeness in _likenesses(tuple(sizes), of_kinds)
        ]

    def copy(self) -> "_Kinds":
        twin = _Kinds()
        twin.summaries, twin._samples = dict(self.summaries), dict(self._samples)
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
        self._step = _Kinds()  # by (B, K): a draft's steps, from rounds in which the drafter read little
        self._step_bound_s: float | None = None  # of a draft's step, from rounds in which it read much
        self._known_s: dict[tuple[int, int], list[float]] = {}  # results of `rounds_s` that still count

    def observe(self, outcome: RoundOutcome) -> None:
        """Add a round's seconds."""
        num_rows, num, verify_s = outcome.num_rows, outcome.num_draft_tokens, outcome.score_s + outcome.other_s
        if num == 0:
            self._known_s.clear()  # a plain step counts for other numbers of rows too
            self._plain.add(num_rows, (num_rows,), verify_s, self._num_drafted)
            return
        if not self.is_tried(num_rows, num) or self._num_drafted % _ESTIMATE_EVERY == 0:
            self._known_s = {key: seconds for key, seconds in self._known_s.items() if key[0] != num_rows}
        self._num_drafted += 1
        self._verify.add((num_rows, num), (num_rows * (num + 1),), verify_s, self._num_drafted)
        step_s = outcome.draft_s / num
        if outcome.num_fed <= _FEW_FED:
            self._step.add((num_rows, num), (num_rows, num), step_s, self._num_drafted)
        else:
            self._step_bound_s = step_s if self._step_bound_s is None else min(self._step_bound_s, step_s)

    def copy(self) -> "CostModel":
        """A model that learns apart from this one."""
        twin = copy.copy(self)
        twin._verify, twin._plain, twin._step = self._verify.copy(), self._plain.copy(), self._step.copy()
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
        """The number of pairs of B and K that were measured."""
        return len(self._verify.summaries)

    def is_tried(self, num_rows: int, num_draft_tokens: int) -> bool:
        """Whether a round with these B and K was run."""
        return (num_rows, num_draft_tokens) in self._verify.summaries

    def rounds_s(self, num_rows: int, max_draft_tokens: int) -> list[float]:
        """[K_max + 1] seconds of a round of `num_rows` rows by K; in units of a plain step before any measurement."""
        if (num_rows, max_draft_tokens) in self._known_s:
            return self._known_s[num_rows, max_draft_tokens]
        nums, plain_s = range(1, max_draft_tokens + 1), self._plain_s(num_rows)
        sizes = [(num_rows * (num + 1),) for num in nums]
        verify_s = self._verify.mean(sizes) if self.num_kinds else [plain_s] * len(nums)
        steps_s = self._steps_s(num_rows, max_draft_tokens)
        seconds = [plain_s, *(num * step + of_k for num, step, of_k in zip(nums, steps_s, verify_s, strict=True))]
        self._known_s[num_rows, max_draft_tokens] = seconds
        return seconds

    def best_case_s(self, num_rows: int, max_draft_tokens: int) -> list[float]:
        """[K_max + 1] optimistic seconds of a round: its verification takes as long as a measured one near it.

        Between two measured numbers of query rows that is the faster of the two, past the largest the fastest of all.
        """
        sizes = sorted({(num_rows,), *(kind.sizes for kind in self._verify.summaries.values())})
        seen_s = self._verify.mean(sizes) if self.num_kinds else [0.0]
        seen_s[sizes.index((num_rows,))] = self._plain_s(num_rows)
        least_s, seconds = min(seen_s), []
        for num, step_s in enumerate((0.0, *self._steps_s(num_rows, max_draft_tokens))):
            right = bisect_left(sizes, (num_rows * (num + 1),))
            near_s = min(seen_s[right - 1 : right + 1]) if 0 < right < len(sizes) else least_s
            seconds.append(num * step_s + near_s)
        return seconds

    def _nearest_plain(self, num_rows: int) -> _Kind | None:
        kinds = self._plain.summaries.values()
        near = [kind for kind in kinds if max(kind.sizes[0], num_rows) <= _ALIKE * min(kind.sizes[0], num_rows)]
        return min(near, key=lambda kind: abs(kind.sizes[0] - num_rows), default=None)

    def _plain_s(self, num_rows: int) -> float:
        """Before any plain step, the estimate of a verification of as many rows."""
        kind = self._nearest_plain(num_rows)
        if kind is not None:
            return kind.median_s
        return self._verify.mean([(num_rows,)])[0] if self.num_kinds else 1.0

    def _steps_s(self, num_rows: int, max_draft_tokens: int) -> list[float]:
        """[K_max] seconds of a step of a draft by K >= 1; before any drafted round, from the models' sizes."""
        if self._step.summaries:
            return self._step.mean([(num_rows, num) for num in range(1, max_draft_tokens + 1)])
        step_s = self._ratio * self._plain_s(num_rows)
        return [step_s if self._step_bound_s is None else min(step_s, self._step_bound_s)] * max_draft_tokens
