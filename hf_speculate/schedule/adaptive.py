"""Drafts as many tokens as pay, and none where none do."""

from hf_speculate.schedule.acceptance import AcceptanceModel
from hf_speculate.schedule.base import RoundOutcome
from hf_speculate.schedule.costs import CostModel
from hf_speculate.schedule.history import Learnt, RoundMemory
from hf_speculate.schedule.throughput import Outlook

# Tuned on the simulated and recorded traces of tests/schedule.
_FIRST_DRAFT_TOKENS = 5
_PLAIN_AT = 2  # round after which a plain step is measured, where drafting pays so far
_PLAIN_AGAIN_AT = 12  # and measured once more where the two come close
_PLAIN_STALE = 200  # drafted rounds, of earlier calls too, after which it is measured anew
_CLOSE = 2.5
_LEAST_TOKENS = 1.04  # of a round with one draft, below which a gain is the clock's noise
_HYSTERESIS = 1.03  # gain for which a draft's length is changed
_EXPLORE_GAIN = 1.2  # that an untried K must promise at its best
_EXPLORE_EVERY = 0.2  # rounds between two untried Ks, over the gain promised: 2 for a tenth, then 1
_FIRST_WAIT = 2  # plain steps before the first probe
_PROBE_BUDGET = 0.0125  # share of the time that probes may cost; waits double up to there
_RARER = 2  # factor by which that share falls, and waits grow faster, after a call whose drafts never paid
_LONGEST_WAIT = 256  # plain steps, whatever probes cost
_SETTLED = 6  # drafted rounds in a row after which waits start anew
_LONG_PROMPT = 8  # tokens of a prompt for every token to come, from which the draft's prompt counts
_LEAST_S = 1e-9  # a plain step that a coarse clock saw no time pass in
_PROBE_MEMORY = 0.5  # weight that a probe leaves to what was seen before


class AdaptiveSchedule:
    """K = the argmax of expected tokens per second over 0..K_max, from measured seconds and acceptance.

    Where plain steps win, K is 0 until a probe of one round, after a wait that doubles with every probe that failed,
    and grows fourfold where the call before drafted in vain.
    A draft that costs as much as the target is never tried: K drafts and a verification cost more than the K + 1
    plain steps that they can replace at best.

    Args:
        max_draft_tokens: K_max, >= 1.
        draft_cost_ratio: the draft's parameter bytes over the target's, what a draft step is taken to cost in plain
            steps until it is measured.
        memory: what earlier calls of this kind learnt, and where it is left for later ones; None: nothing is kept.
        num_rows: B of the first round.
    """

    def __init__(
        self, max_draft_tokens: int, draft_cost_ratio: float, memory: RoundMemory | None = None, num_rows: int = 1
    ):
        self._max = max_draft_tokens
        self._is_hopeless = draft_cost_ratio >= 1
        self._memory, known = memory, memory and memory.recall()
        learnt = known or Learnt(AcceptanceModel(max_draft_tokens), CostModel(draft_cost_ratio), is_in_vain=False)
        self._acceptance, self._costs, is_in_vain = learnt
        self._rarer = _RARER if is_in_vain else 1
        self._has_paid = False  # for some rounds in a row
        self._num_rounds = 0
        self._num_drafted_rounds = 0  # in a row
        self._num_plain_rounds = 0  # in a row
        self._num_since_untried = 0
        self._wait = _FIRST_WAIT
        self._settled = 0  # the K that the argmax last chose
        self._ratio = draft_cost_ratio
        self._is_probe = False
        self._probe_s = 0.0  # seconds of the last probe, in which the draft read the plain steps' tokens first
        self._start_s = 0.0  # seconds that the draft will take to read a long prompt, once it is asked
        self._num = (
            0 if self._is_hopeless else self._first(num_rows, max_draft_tokens if known else _FIRST_DRAFT_TOKENS)
        )

    @property
    def num_draft_tokens(self) -> int:
        """The K that promises most, or one that is to be measured."""
        return self._num

    def begin(self, prompt_s: float, num_prompt_tokens: int, num_left: int) -> None:
        """Before a short text after a long prompt a plain step comes first: drafts may not be worth their prompt."""
        if num_prompt_tokens > _LONG_PROMPT * num_left:
            self._start_s = self._ratio * prompt_s
            self._num = 0

    def update(self, outcome: RoundOutcome) -> None:
        """Learn from a round and choose the next K."""
        num_left = outcome.num_left or [1] * len(outcome.row_ids)
        left_of = {row: left for row, left in zip(outcome.row_ids, num_left, strict=True) if left > 0}
        if not left_of and self._memory is not None:
            # A call that ended before its draft was asked again cannot tell: what was known stands.
            is_in_vain = not self._has_paid and (self._rarer > 1 or self._wait > _FIRST_WAIT)
            self._memory.remember(Learnt(self._acceptance, self._costs, is_in_vain))
        if self._is_hopeless or not left_of:
            return
        self._num_rounds += 1
        self._costs.observe(outcome)
        if outcome.num_draft_tokens:
            self._num_drafted_rounds += 1
            self._start_s = 0.0
            if self._is_probe:
                self._probe_s = outcome.draft_s + outcome.score_s + outcome.other_s
            self._is_probe = False
            self._acceptance.observe(outcome.row_ids, outcome.num_accepted, outcome.num_draft_tokens)
        outlook = Outlook(self._acceptance.expected_tokens(list(left_of)), list(left_of.values()), self._start_s)
        self._num = self._next(outlook, outcome.num_rows)

    def _first(self, num_rows: int, max_draft_tokens: int) -> int:
        outlook = Outlook(self._acceptance.expected_tokens(range(num_rows)), [1] * num_rows)
        rates = self._rates(outlook, num_rows)
        return rates.index(max(rates[: max_draft_tokens + 1]))

    def _rates(self, outlook: Outlook, num_rows: int) -> list[float]:
        return outlook.rates(self._costs.rounds_s(num_rows, self._max), self._costs.rounds_s(1, self._max))

    def _next(self, outlook: Outlook, num_rows: int) -> int:
        rates = self._rates(outlook, num_rows)
        best = rates.index(max(rates))
        if max(tokens[1] for tokens in outlook.tokens) < _LEAST_TOKENS:
            best = 0
        if best and self._settled and rates[self._settled] * _HYSTERESIS >= rates[best]:
            best = self._settled
        self._settled = best
        untried = self._untried(outlook, num_rows, rates[best])
        if best == 0 and not untried:
            return self._plain_or_probe(rates, num_rows)
        self._num_plain_rounds = 0
        if self._num_drafted_rounds >= _SETTLED:
            self._wait, self._rarer, self._has_paid = _FIRST_WAIT, 1, True
        if self._wants_plain(rates[best], rates[0], num_rows):
            return 0
        return untried or best

    def _wants_plain(self, best_rate: float, plain_rate: float, num_rows: int) -> bool:
        """Whether a plain step must be measured, without which nobody knows that drafting pays."""
        num_samples = self._costs.num_plain_samples(num_rows)
        if num_samples == 0 or self._costs.plain_age(num_rows) > _PLAIN_STALE:
            return self._num_rounds >= _PLAIN_AT
        is_close = best_rate < _CLOSE * plain_rate
        return num_samples == 1 and is_close and self._num_rounds >= _PLAIN_AGAIN_AT

    def _plain_or_probe(self, rates: list[float], num_rows: int) -> int:
        self._num_drafted_rounds = 0
        self._num_plain_rounds += 1
        if self._start_s:
            return 0  # with fewer tokens left it can only pay less
        likeliest = rates.index(max(rates[1:]), 1)
        longest = self._longest_wait(likeliest, num_rows)
        if self._num_plain_rounds <= min(self._wait, longest):
            return 0
        self._num_plain_rounds = 0
        self._wait = max(min(2 * self._rarer * self._wait, longest), _FIRST_WAIT)
        self._acceptance.soften(_PROBE_MEMORY)
        self._is_probe = True
        return likeliest

    def _longest_wait(self, num_draft_tokens: int, num_rows: int) -> int:
        """Plain steps between two probes that fail, for probes to stay within their budget."""
        seconds = self._costs.rounds_s(num_rows, self._max)
        surplus_s = max(seconds[num_draft_tokens], self._probe_s) - seconds[0]
        return min(max(round(surplus_s / max(seconds[0], _LEAST_S) / _PROBE_BUDGET * self._rarer), 0), _LONGEST_WAIT)

    def _untried(self, outlook: Outlook, num_rows: int, best_rate: float) -> int:
        """The untried K that may gain most, at its best; 0 where none may, or another was tried a moment ago."""
        self._num_since_untried += 1
        untried = [num for num in range(1, self._max + 1) if not self._costs.is_tried(num_rows, num)]
        least_s = self._costs.best_case_s(num_rows, self._max)
        rates = outlook.rates(least_s, least_s)
        promising = [num for num in untried if rates[num] > _EXPLORE_GAIN * best_rate]
        if not promising:
            return 0
        foretold_s = self._costs.rounds_s(num_rows, self._max)
        likely_s = [(least + foretold) / 2 for least, foretold in zip(least_s, foretold_s, strict=True)]
        likely_rates = outlook.rates(likely_s, likely_s)
        choice = max(promising, key=lambda num: likely_rates[num])
        if self._num_since_untried * (rates[choice] / best_rate - 1) < _EXPLORE_EVERY:
            return 0
        self._num_since_untried = 0
        return choice
