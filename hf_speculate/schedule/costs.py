"""The cost model: how many seconds a round of K drafts takes."""

import copy
import math
from bisect import bisect_left
from operator import add

from hf_speculate.schedule.base import RoundOutcome
from hf_speculate.schedule.cost_line import TINY, Cost, CostLine
from hf_speculate.schedule.machine_speed import MachineSpeed
from hf_speculate.schedule.plain_steps import PlainSteps
from hf_speculate.schedule.prior import DraftPrior
from hf_speculate.schedule.read_costs import ReadCosts

_ESTIMATE_EVERY = 6  # drafted rounds of sizes that were measured before; to estimate takes 1 % of a small model's round
_FEW_FED = 2  # tokens that the drafter reads in a round that follows a drafted one
_SETTLED = 3  # samples of a size after which it is not tried again
_TRUSTED = 16  # drafted rounds, times its samples, for which a size of fewer samples counts as measured
_MOST_FIRST = 3.0  # plain steps that a first verification or read counts as at most; a first draft of K tokens as K


class CostModel:
    """Seconds of a round by rows B and drafted tokens K, from measurements that vary by a fifth.

    A round is K draft steps and a verification. Single rounds are too noisy to compare. The seconds of a verification
    grow about linearly with its B * (K + 1) query rows, those of a draft with K, so a line is fitted to the medians of
    all measured sizes. Some sizes suit the hardware better, so the residuals of measured sizes are added, weighted by
    their samples. Plain steps take another path through the model and are kept apart.

    Args:
        prior: what is known before any drafted round.
    """

    def __init__(self, prior: DraftPrior):
        self.plain = PlainSteps()
        self._prior = prior
        self._num_drafted = 0
        self._verify = CostLine()  # by query rows: scoring and all that follows
        self._draft = CostLine(is_proportional=True)  # by B and K, from rounds in which the drafter read little
        self._plain_ratios: dict[int, float] = {}  # seconds of a plain step over a verification's, by rows; at least 1
        self._speed = MachineSpeed()
        self._step_bound_s: float | None = None  # bound of a draft's step, from rounds in which it read much
        self._reads = ReadCosts(prior.step_ratio or 0.0)
        self._known_s: dict[tuple[int, int], list[float]] = {}  # results of `rounds_s` that still count
        self._counted_s: dict[int, float] = {}  # results of `counted_plain_s` since the last round

    def begin(self, prefill_s: float, num_read: int) -> None:
        """Record the seconds of a target's prefill that read `num_read` tokens of each row."""
        self._reads.begin(prefill_s, num_read)

    def observe(self, outcome: RoundOutcome, has_read_prompt: bool = False) -> None:
        """Add a round's seconds; `has_read_prompt` says whether the drafter read a prompt before its first step."""
        num_rows, num, verify_s = outcome.num_rows, outcome.num_draft_tokens, outcome.score_s + outcome.other_s
        self._counted_s.clear()
        if num == 0:
            self._known_s.clear()
            was_known = self.plain.is_known(num_rows)
            self.plain.add(num_rows, verify_s, self._num_drafted)
            if not was_known and self.plain.is_known(num_rows):
                self._cap_first(num_rows)
            if num_rows not in self._plain_ratios:
                self._compare_plain(num_rows)
            return
        self._follow_speed(num_rows * (num + 1), verify_s)
        plain_s = self.plain_s(num_rows) if self.plain.is_known(num_rows) else math.inf
        if not self.is_tried(num_rows, num) or self._num_drafted % _ESTIMATE_EVERY == 0:
            self._known_s.clear()
        self._num_drafted += 1
        self._verify.add(1, num_rows * (num + 1), verify_s, self._num_drafted, _MOST_FIRST * plain_s)
        if outcome.num_fed <= _FEW_FED:
            self._draft.add(num_rows, num, outcome.draft_s, self._num_drafted, num * plain_s)
        else:
            step_s = outcome.draft_s / num
            self._step_bound_s = step_s if self._step_bound_s is None else min(self._step_bound_s, step_s)
            self._reads.add(num_rows, outcome.num_fed, num, outcome.draft_s, has_read_prompt)
        self._compare_plain(num_rows)

    def _follow_speed(self, size: int, verify_s: float) -> None:
        """Measure plain steps anew if the machine has become faster or slower; other seconds are scaled."""
        usual_s = self._verify.usual_s(1, size)
        factor = self._speed.add(verify_s / max(usual_s, TINY)) if usual_s else 1.0
        if factor == 1.0:
            return
        self._known_s.clear()
        self._verify.scale(factor)
        self._draft.scale(factor)
        self.plain = PlainSteps()

    def _cap_first(self, num_rows: int) -> None:
        """Let first rounds of a size, which may load kernels or compile, count as what is likely at most."""
        plain_s = self.plain_s(num_rows)
        self._verify.cap_first(lambda _: _MOST_FIRST * plain_s)
        self._draft.cap_first(lambda key: key[1] * plain_s)

    def recent(self) -> "CostModel":
        """A copy for a later call, which learns apart from this one."""
        twin = copy.copy(self)
        twin._verify, twin.plain, twin._draft = self._verify.copy(), self.plain.recent(), self._draft.copy()
        twin._known_s, twin._reads, twin._speed = dict(self._known_s), self._reads.copy(), MachineSpeed()
        twin._plain_ratios, twin._counted_s = dict(self._plain_ratios), {}
        return twin

    def plain_s(self, num_rows: int) -> float:
        """Seconds of a plain step; before any was measured, of a verification of as many rows."""
        seconds = self.plain.seconds(num_rows)
        if seconds is None:
            return self._verify.estimate(1, (num_rows,))[0] if self._verify.costs else 1.0
        return self._within_verification(seconds, num_rows)

    def counted_plain_s(self, num_rows: int) -> float:
        """p(n), as which the budget counts a plain step; 0 before any measurement.

        It is no more than a verification of as many query rows takes, or as many times that as when both were first
        measured: a verification that takes less by now says that the machine has become faster.
        """
        if num_rows not in self._counted_s:
            self._counted_s[num_rows] = self._count_plain(num_rows)
        return self._counted_s[num_rows]

    def _count_plain(self, num_rows: int) -> float:
        seconds = self.plain.counted_s(num_rows)
        if seconds is None:
            return self.plain_s(num_rows) if self._verify.costs else 0.0
        shortest_s = self._verify.least_median_s(num_rows) * self._plain_ratios.get(num_rows, 1.0)
        return min(self._within_verification(seconds, num_rows), shortest_s)

    def _compare_plain(self, num_rows: int) -> None:
        """Record how many verifications a plain step takes, where these are faster: they take another path."""
        verify_s = self._verify.least_median_s(num_rows)
        if verify_s < math.inf and not self.plain.is_remembered(num_rows) and self.plain.is_known(num_rows):
            ratio = max(self.plain_s(num_rows) / max(verify_s, TINY), 1.0)
            self._plain_ratios[num_rows] = min(self._plain_ratios.get(num_rows, ratio), ratio)

    def _within_verification(self, plain_s: float, num_rows: int) -> float:
        """A single plain step, the first of its size, takes no longer than any verification of as many query rows."""
        if self.plain.is_known(num_rows):
            return plain_s
        return min([plain_s, *(median_s for size, median_s in self._verify.medians() if size >= num_rows)])

    def is_plain_stale(self, num_rows: int) -> bool:
        """Whether plain steps were last measured long ago."""
        return self.plain.is_stale(num_rows, self._num_drafted)

    @property
    def num_sizes(self) -> int:
        """The number of sizes of verifications that were measured."""
        return len(self._verify.costs)

    def is_tried(self, num_rows: int, num_draft_tokens: int) -> bool:
        """Whether a verification of as many query rows was measured."""
        return (1, num_rows * (num_draft_tokens + 1)) in self._verify.costs

    def is_settled(self, num_rows: int, num_draft_tokens: int) -> bool:
        """Whether so many verifications of as many query rows were measured that their seconds need no trial.

        The first one of a size may have loaded kernels, or the machine may have been busy: then a second one is needed.
        """
        cost = self._verify.costs.get((1, num_rows * (num_draft_tokens + 1)))
        return cost is not None and self._settles(cost)

    def _settles(self, cost: Cost) -> bool:
        is_new = self._num_drafted - cost.newest < _TRUSTED * cost.num_samples
        return cost.num_samples >= _SETTLED or is_new

    def rounds_s(self, num_rows: int, max_draft_tokens: int) -> list[float]:
        """[K_max + 1] seconds of a round of `num_rows` rows by K; in units of a plain step before any measurement."""
        if (num_rows, max_draft_tokens) in self._known_s:
            return self._known_s[num_rows, max_draft_tokens]
        plain_s, drafts_s = self.plain_s(num_rows), self._drafts_s(num_rows, max_draft_tokens)
        verify_s = self._verify_s(num_rows, max_draft_tokens, plain_s)
        seconds = self._known_s[num_rows, max_draft_tokens] = [plain_s, *map(add, drafts_s, verify_s)]
        return seconds

    def best_case_s(self, num_rows: int, max_draft_tokens: int) -> list[float]:
        """[K_max + 1] optimistic seconds of a round.

        Its verification lies below the line of the settled sizes as far as any did, but takes no less than those of
        the settled sizes next to it, a plain step among them.
        """
        if not self._verify.costs:
            return self.rounds_s(num_rows, max_draft_tokens)
        settled = self._verify.settled(self._settles)
        intercept, slope = settled.line(1)
        plain_s = self.plain_s(num_rows)
        measured = sorted([(num_rows, plain_s), *settled.medians()])
        share = min(seconds / max(intercept + slope * size, TINY) for size, seconds in measured)
        best_s = [plain_s]
        for num, draft_s in enumerate(self._drafts_s(num_rows, max_draft_tokens), start=1):
            size = num_rows * (num + 1)
            right = bisect_left(measured, (size,))
            near_s = min(seconds for _, seconds in measured[right - 1 : right + 1]) if right < len(measured) else 0.0
            best_s.append(draft_s + max(share * (intercept + slope * size), near_s))
        return best_s

    def read_s(self, num_rows: int, num_unread: int, num_prompt: int = 0) -> float:
        """Seconds in which the drafter reads what it has not seen, before its first step; as `ReadCosts.seconds`."""
        if num_unread <= _FEW_FED:
            return 0.0
        most_s = _MOST_FIRST * self.plain_s(num_rows)
        return self._reads.seconds(
            num_rows, num_unread, num_prompt, lambda rows, num: self._drafts_s(rows, num)[-1], most_s
        )

    @property
    def has_reads(self) -> bool:
        """Whether it was measured how long the drafter reads."""
        return self._reads.is_measured

    def _verify_s(self, num_rows: int, max_draft_tokens: int, plain_s: float) -> list[float]:
        """[K_max] seconds of a verification by K >= 1."""
        if not self._verify.costs:
            return [plain_s] * max_draft_tokens
        sizes = range(2 * num_rows, (max_draft_tokens + 1) * num_rows + 1, num_rows)
        seconds = self._verify.estimate(1, sizes)
        smallest = min((size for _, size in self._verify.costs if size > num_rows), default=0)
        if smallest <= sizes[0] or not self.plain.is_measured:
            return seconds
        # what was measured says little of shorter drafts: on a line from the plain step to the shortest at most
        slope = (self._verify.estimate(1, (smallest,))[0] - plain_s) / (smallest - num_rows)
        lines = [plain_s + slope * (size - num_rows) if size < smallest else math.inf for size in sizes]
        return list(map(min, seconds, lines))

    def _drafts_s(self, num_rows: int, max_draft_tokens: int) -> list[float]:
        """[K_max] seconds of a draft by K >= 1; before any drafted round, from the models' sizes."""
        nums = range(1, max_draft_tokens + 1)
        if self._draft.costs:
            return self._draft.estimate(num_rows, nums)
        plain_s = self.plain_s(num_rows)
        drafts_s = [plain_s * self._prior.draft_steps(num) for num in nums]
        if self._step_bound_s is None:
            return drafts_s
        return [min(draft_s, num * self._step_bound_s) for num, draft_s in zip(nums, drafts_s, strict=True)]
