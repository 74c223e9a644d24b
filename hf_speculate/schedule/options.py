"""The options of the next round: the throughput of each draft length, and whether the budget pays for it."""

import math
from collections.abc import Mapping, Sequence

from hf_speculate.schedule.call_state import CallState
from hf_speculate.schedule.work import LEAST_S, RemainingWork

# Tuned on the simulated and recorded traces of tests/schedule.
_LEAST_TOKENS = 1.04  # expected tokens of a round with K = 1, below which a small gain is measurement noise
_LEAST_GAIN = 1.1  # over plain steps, from which it is not: a few tokens may take another path through the model
_CLOSE = 1.6  # gain of drafting over plain steps above which a single one is enough
_LEAST_LEFT = 8  # tokens of the longest row for which a plain step of another number of rows is measured
_TRIAL_MEMORY = 0.25  # weight that a trial leaves to earlier observations


class Options:
    """Draft lengths 0..K_max for the live rows; what takes time to estimate is estimated when it is read.

    Args:
        call: the estimates.
        num_rows: B of the next round.
        left_of: tokens that each live row may still emit.
        is_vain: whether the drafter was asked in the last round and proposed nothing.
    """

    def __init__(self, call: CallState, num_rows: int, left_of: Mapping[int, int], is_vain: bool = False):
        self.call, self.num_rows, self.left_of, self.is_vain = call, num_rows, left_of, is_vain
        self._rounds_s: list[float] = []
        self._read_s: float | None = None
        self._work: RemainingWork | None = None
        self._rates: list[float] = []
        self._best: int | None = None

    @property
    def rounds_s(self) -> list[float]:
        """[K_max + 1] seconds of a round."""
        if not self._rounds_s:
            self._rounds_s = self.call.costs.rounds_s(self.num_rows, self.call.max_draft_tokens)
        return self._rounds_s

    @property
    def read_s(self) -> float:
        """Seconds in which the drafter reads what it has not seen."""
        if self._read_s is None:
            self._read_s = self.call.costs.read_s(self.num_rows, self.call.num_unread, self.call.num_prompt)
        return self._read_s

    @property
    def work(self) -> RemainingWork:
        """The remaining work of the call."""
        if self._work is None:
            tokens = self.call.acceptance.expected_tokens(list(self.left_of))
            start_s = self.read_s if self.call.num_prompt and self.call.counts_prompt else 0.0
            self._work = RemainingWork(tokens, list(self.left_of.values()), start_s)
        return self._work

    @property
    def rates(self) -> list[float]:
        """[K_max + 1] tokens per second."""
        if not self._rates:
            alone_s = self.call.costs.rounds_s(1, self.call.max_draft_tokens)
            # K is chosen again when rows leave, so the K that is fastest for one row does not count now
            pairs = zip(alone_s[1:], self.rounds_s[1:], strict=True)
            share = min(alone / max(together, LEAST_S) for alone, together in pairs) if self.num_rows > 1 else 1.0
            self._rates = self.work.rates(self.rounds_s, share)
        return self._rates

    @property
    def best(self) -> int:
        """The K with the highest throughput; 0 if drafting does not pay."""
        if self._best is None:
            rates = self.rates
            best = rates.index(max(rates))
            is_small = self.work.max_tokens_of_one_draft < _LEAST_TOKENS and rates[best] < _LEAST_GAIN * rates[0]
            self._best = 0 if is_small else best
        return self._best

    @property
    def shortest(self) -> int:
        """The shortest draft that is faster than plain steps, or the best one."""
        return next((num for num in range(1, self.best) if self.rates[num] > self.rates[0]), self.best)

    @property
    def trial(self) -> int:
        """K of a round that tries whether drafting pays; 0 if it cannot, even if all drafts were accepted."""
        most = max(self.left_of.values())
        all_accepted_s = [round_s * most / (num + 1) for num, round_s in enumerate(self.rounds_s)]
        can_pay = self.read_s + min(all_accepted_s[1:]) < all_accepted_s[0]
        return self._fastest(range(1, self.call.longest_draft + 1)) if can_pay else 0

    def untried(self) -> int:
        """A draft length that was never measured and may be much faster; 0 if there is none, or it must wait."""
        call = self.call
        best_rate = self.rates[self.best]
        return call.exploration.next(call.costs, self.work, self.num_rows, call.max_draft_tokens, best_rate)

    def extra_s(self, num_draft_tokens: int) -> float:
        """w(K), what a round loses if all its drafts are rejected."""
        return self.rounds_s[num_draft_tokens] + self.read_s - self.call.costs.counted_plain_s(self.num_rows)

    def steps_until(self, num_draft_tokens: int) -> int:
        """Plain steps until the budget pays for a round of K drafts."""
        shortfall_s = self.call.budget.shortfall_s(self.extra_s(num_draft_tokens))
        return math.ceil(shortfall_s / max(self.rounds_s[0], LEAST_S))

    def affordable(self, num_draft_tokens: int) -> int:
        """K, or the fastest shorter draft that the budget pays for; 0 if plain steps are faster than all of them."""
        most = min(num_draft_tokens, self.call.longest_draft)
        if most == 0 or not self.steps_until(most):
            return most
        shorter = [num for num in range(1, most) if self.rates[num] > self.rates[0] and not self.steps_until(num)]
        return self._fastest(shorter) if shorter else 0

    def lacks_plain(self) -> bool:
        """Whether too few plain steps were measured to try what drafting gains."""
        return not self.call.costs.plain.is_known(self.num_rows) and self._is_worth_measuring()

    def wants_plain(self) -> bool:
        """Whether a plain step must be measured while drafting pays: without one nobody knows whether it does."""
        costs, is_close = self.call.costs, self.rates[self.best] < _CLOSE * self.rates[0]
        if costs.plain.is_known(self.num_rows, num_samples=2 if is_close else 1):
            return costs.is_plain_stale(self.num_rows)
        return self._is_worth_measuring()

    def begin_trial(self) -> None:
        """Let the next round count for more than those before it."""
        self.call.acceptance.soften(_TRIAL_MEMORY)

    def _is_worth_measuring(self) -> bool:
        return not self.call.costs.plain.is_measured or max(self.left_of.values()) >= _LEAST_LEFT

    def _fastest(self, nums: Sequence[int]) -> int:
        return max(nums, key=self.rates.__getitem__)
