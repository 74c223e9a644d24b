"""The adaptive schedule: the draft length with the highest estimated throughput, 0 if drafting does not pay."""

from collections.abc import Sequence

from hf_speculate.schedule.acceptance import AcceptanceModel
from hf_speculate.schedule.base import RoundOutcome, Schedule
from hf_speculate.schedule.costs import CostModel
from hf_speculate.schedule.history import ScheduleEstimates, ScheduleHistory

# Tuned on the simulated and recorded traces of tests/schedule.
_FIRST_DRAFT_TOKENS = 5  # at most
_GROWTH = 2  # tokens by which a draft may be longer than the last one: estimates of long drafts rest on few rounds
_PLAIN_AT = 3  # round after which a plain step is measured if drafting has paid so far
_PLAIN_AGAIN_AT = 12  # round after which it is measured once more if both rates are close
_PLAIN_STALE = 200  # drafted rounds, including those of earlier calls, after which it is measured again
_CLOSE = 1.6  # ratio of the rates below which they are close
_LEAST_TOKENS = 1.04  # expected tokens of a round with K = 1, below which a gain is measurement noise
_EXPLORE_GAIN = 1.15  # optimistic gain from which an untried K is tried
_EXPLORE_EVERY = 0.3  # rounds between two untried Ks, divided by the optimistic gain: 3 for a gain of 0.1
_LOOK_EVERY = 4  # rounds after which untried Ks are looked at again, if no other K was measured since
_FIRST_WAIT = 2  # plain steps before the first probe
_PROBE_BUDGET = 0.0125  # share of the decoding time that probes may cost; waits double up to that share
_RARER = 2  # factor by which probes get rarer after a call whose drafts never paid
_LONGEST_WAIT = 256  # plain steps between two probes at most
_SETTLED = 6  # drafted rounds in a row after which waits are reset
_LONG_PROMPT = 8  # prompt tokens per token to come from which the draft's prefill is taken into account
_LEAST_S = 1e-9  # seconds of a round if the clock is too coarse to see any
_PROBE_MEMORY = 0.5  # weight that a probe leaves to earlier observations


class RemainingWork:
    """The live rows after a round, and the throughput estimate of each K for them.

    Args:
        tokens: [N][K_max + 1] expected tokens per round of each row.
        num_left: [N] tokens that each row may still emit, >= 1.
        start_s: seconds before the first draft: the draft's prefill, if it is still to come.
    """

    def __init__(self, tokens: Sequence[Sequence[float]], num_left: Sequence[int], start_s: float = 0.0):
        self.max_tokens_of_one_draft = max(of_row[1] for of_row in tokens)  # expected tokens of a round with K = 1
        self._num_left = sum(num_left)
        self._start_s = start_s
        by_row = [[left / num for num in of_row] for left, of_row in zip(num_left, tokens, strict=True)]
        # by K, of the slowest row, and the sum of all rows
        self._num_rounds = [(max(of_k), sum(of_k)) for of_k in zip(*by_row, strict=True)]
        self._num_others = max(len(tokens) - 1, 1)
        self.most_rounds = self._num_rounds[-1][0]  # of the slowest row, with drafts of K_max tokens

    def rates(self, rounds_s: Sequence[float], alone_share: float = 1.0) -> list[float]:
        """[K_max + 1] tokens per second until the last row ends.

        A call is as slow as its slowest row, so the K that suits most rows may be the wrong one. Rows leave as they
        end, and a round's seconds fall from those of all rows to those of one in equal steps.

        Args:
            rounds_s: [K_max + 1] seconds of a round of all rows.
            alone_share: seconds of a round of one row over those of all rows.
        """
        rates, start_s = [], 0.0
        for round_s, (most, total) in zip(rounds_s, self._num_rounds, strict=True):
            num_rounds = alone_share * most + (1 - alone_share) * (total - most) / self._num_others  # of all rows
            rates.append(self._num_left / max(num_rounds * round_s + start_s, _LEAST_S))
            start_s = self._start_s
        return rates


class AdaptiveSchedule(Schedule):
    """Drafts the K in 0..K_max with the most expected tokens per second, from measured seconds and acceptance.

    If plain steps are fastest, K is 0 until a probe of one round. The wait before a probe doubles with every probe that
    did not pay, and grows fourfold if drafting never paid in the previous call. A draft that costs as much as the
    target is never tried: K drafts and a verification cost more than the K + 1 plain steps that they replace at best.

    Args:
        max_draft_tokens: K_max, >= 1.
        draft_cost_ratio: the draft's parameter bytes over the target's; the cost of a draft step in plain steps until
            it is measured.
        history: estimates of earlier calls of this kind; None keeps nothing.
        num_rows: B of the first round.
    """

    def __init__(
        self, max_draft_tokens: int, draft_cost_ratio: float, history: ScheduleHistory | None = None, num_rows: int = 1
    ):
        self._max = max_draft_tokens
        self._never_drafts = draft_cost_ratio >= 1
        self._history, known = history, history and history.recall()
        self._acceptance, self._costs, never_paid = known or ScheduleEstimates(
            AcceptanceModel(max_draft_tokens), CostModel(draft_cost_ratio), never_paid=False
        )
        self._rarer = _RARER if never_paid else 1
        self._has_paid = False  # for some rounds in a row
        self._is_remembered = True  # whether the history has all that was learnt
        self._num_rounds = 0
        self._num_drafted_rounds = 0  # in a row
        self._num_plain_rounds = 0  # in a row
        self._num_since_untried = 0
        self._num_kinds = 0  # kinds of rounds that had been measured when untried Ks were last looked at
        self._wait = _FIRST_WAIT
        self._waiting = (0, 0)  # rows, and their plain steps in a row before K is chosen again
        self._ratio = draft_cost_ratio
        self._last = _FIRST_DRAFT_TOKENS  # K of the last drafted round
        self.is_probe = False
        self._probe_s = 0.0  # seconds of the last probe, in which the draft first read the tokens of the plain steps
        self._start_s = 0.0  # seconds of the draft's prefill of a long prompt, while it is still to come
        self.num_draft_tokens = 0
        if not self._never_drafts:
            self.num_draft_tokens = self._first(num_rows)

    def begin(self, prompt_s: float, num_prompt_tokens: int, num_left: int) -> None:
        """Start with a plain step if few tokens follow a long prompt: drafting may not be worth the draft's prefill."""
        if num_prompt_tokens > _LONG_PROMPT * num_left:
            self._start_s = self._ratio * prompt_s
            self.num_draft_tokens = 0

    def update(self, outcome: RoundOutcome) -> None:
        """Learn from a round and choose the next K."""
        num_left = outcome.num_left or [1] * len(outcome.row_ids)
        left_of = {row: left for row, left in zip(outcome.row_ids, num_left, strict=True) if left > 0}
        self._is_remembered = False
        if not left_of:
            self.end()
        if self._never_drafts or not left_of:
            return
        self._num_rounds += 1
        self._costs.observe(outcome)
        if outcome.num_draft_tokens:
            self._num_drafted_rounds += 1
            self._last = outcome.num_draft_tokens
            self._start_s = 0.0
            if self.is_probe:
                self._probe_s = outcome.draft_s + outcome.score_s + outcome.other_s
            self.is_probe = False
            self._acceptance.observe(outcome.row_ids, outcome.num_accepted, outcome.num_draft_tokens)
        elif outcome.num_rows == self._waiting[0] and self._num_plain_rounds < self._waiting[1]:
            self._num_plain_rounds += 1  # without the estimates: they take 2 % of a small model's plain step
            return
        self._waiting = (0, 0)
        work = RemainingWork(self._acceptance.expected_tokens(list(left_of)), list(left_of.values()), self._start_s)
        self.num_draft_tokens = self._next(work, outcome.num_rows)

    def end(self) -> None:
        """Keep the estimates for the next call."""
        if self._history is None or self._is_remembered:
            return
        self._is_remembered = True
        # A call that ended before its draft was probed again cannot tell: the previous flag stays.
        never_paid = not self._has_paid and (self._rarer > 1 or self._wait > _FIRST_WAIT)
        self._history.remember(ScheduleEstimates(self._acceptance, self._costs, never_paid))

    def _first(self, num_rows: int) -> int:
        work = RemainingWork(self._acceptance.expected_tokens(range(num_rows)), [1] * num_rows)
        return _best(self._rates(work, num_rows)[: _FIRST_DRAFT_TOKENS + 1])

    def _rates(self, work: RemainingWork, num_rows: int) -> list[float]:
        rounds_s, alone_s = self._costs.rounds_s(num_rows, self._max), self._costs.rounds_s(1, self._max)
        # K is chosen again when rows leave, so the K that is fastest for one row does not count now
        shares = [alone / max(together, _LEAST_S) for alone, together in zip(alone_s, rounds_s, strict=True)]
        return work.rates(rounds_s, min(shares[1:]))

    def _next(self, work: RemainingWork, num_rows: int) -> int:
        rates = self._rates(work, num_rows)
        best = _best(rates)
        if work.max_tokens_of_one_draft < _LEAST_TOKENS:
            best = 0
        untried = self._untried(work, num_rows, rates[best])
        if best == 0 and not untried:
            return self._plain_or_probe(rates, num_rows)
        self._num_plain_rounds = 0
        if self._num_drafted_rounds >= _SETTLED:
            self._wait, self._rarer, self._has_paid = _FIRST_WAIT, 1, True
        if self._wants_plain(rates[best], rates[0], num_rows):
            return 0
        return min(untried or best, max(self._last + _GROWTH, _FIRST_DRAFT_TOKENS))

    def _wants_plain(self, best_rate: float, plain_rate: float, num_rows: int) -> bool:
        """Whether a plain step must be measured, to know whether drafting pays."""
        num_samples = self._costs.num_plain_samples(num_rows)
        if num_samples == 0 or self._costs.plain_age(num_rows) > _PLAIN_STALE:
            return self._num_rounds >= _PLAIN_AT
        is_close = best_rate < _CLOSE * plain_rate
        return num_samples == 1 and is_close and self._num_rounds >= _PLAIN_AGAIN_AT

    def _plain_or_probe(self, rates: Sequence[float], num_rows: int) -> int:
        self._num_drafted_rounds = 0
        self._num_plain_rounds += 1
        if self._start_s:
            return 0  # with fewer tokens left the prefill pays even less
        likeliest = 1 + _best(rates[1:])
        longest = self._longest_wait(likeliest, num_rows)
        if self._num_plain_rounds <= min(self._wait, longest):
            if self._wait > _FIRST_WAIT:  # before, one more measured plain step may change what is best
                self._waiting = num_rows, min(self._wait, longest)
            return 0
        self._num_plain_rounds = 0
        self._wait = max(min(2 * self._rarer * self._wait, longest), _FIRST_WAIT)
        self._acceptance.soften(_PROBE_MEMORY)
        self.is_probe = True
        return likeliest

    def _longest_wait(self, num_draft_tokens: int, num_rows: int) -> int:
        """Plain steps between two probes that do not pay, so that probes stay within their budget."""
        seconds = self._costs.rounds_s(num_rows, self._max)
        surplus_s = max(seconds[num_draft_tokens], self._probe_s) - seconds[0]
        return min(max(round(surplus_s / max(seconds[0], _LEAST_S) / _PROBE_BUDGET * self._rarer), 0), _LONGEST_WAIT)

    def _untried(self, work: RemainingWork, num_rows: int, best_rate: float) -> int:
        """The untried K with the highest optimistic rate; 0 if none may gain, or a trial must wait."""
        self._num_since_untried += 1
        if work.most_rounds < _LOOK_EVERY:  # too few rounds are left to profit from a trial
            return 0
        if self._costs.num_kinds == self._num_kinds and self._num_since_untried % _LOOK_EVERY:
            return 0
        self._num_kinds = self._costs.num_kinds
        untried = [num for num in range(1, self._max + 1) if not self._costs.is_tried(num_rows, num)]
        if not untried:
            return 0
        least_s = self._costs.best_case_s(num_rows, self._max)
        rates = work.rates(least_s)
        promising = [num for num in untried if rates[num] > _EXPLORE_GAIN * best_rate]
        if not promising:
            return 0
        rounds_s = self._costs.rounds_s(num_rows, self._max)
        likely_s = [(least + likely) / 2 for least, likely in zip(least_s, rounds_s, strict=True)]
        likely_rates = work.rates(likely_s)
        choice = max(promising, key=lambda num: likely_rates[num])
        if self._num_since_untried * (rates[choice] / best_rate - 1) < _EXPLORE_EVERY:
            return 0
        self._num_since_untried = 0
        return choice


def _best(rates: Sequence[float]) -> int:
    return max(range(len(rates)), key=rates.__getitem__)
