"""The budget of a call: drafted rounds may lose a fiftieth of its seconds against plain decoding.

- p(n) is the mean of the measured seconds of a plain step of n rows; a single step counts as less (`CostModel`). A
  round counts with p as it was then: if the machine becomes slower later, what was replaced before it gains nothing.
- L is what drafting has lost so far: the seconds of drafted rounds, minus p(n) for each plain step that all rounds
  replaced (n is the number of rows that plain decoding has in that step, see `Progress`), plus p of each plain round.
  Rows that are ahead of the one furthest behind have replaced no step yet, but plain decoding would have them in its
  steps for longer: L is lower by b for each token that they are ahead, where b is the least that p falls per row.
- E is the seconds of the call so far, the target's prefill included.
- w(K) is what a round of K drafts loses if all of them are rejected: its estimated seconds, those in which the drafter
  reads what it has not seen included, minus p.
- C is a credit. In the first call of its type it is what the first drafted round takes more than p; the most that the
  drafter took before it to propose nothing, because it read the prompt then; and for more rounds half of p, or one more
  round of a draft that is known to be cheap, but nothing for one that is known to be expensive. In a later call it is
  what earlier calls have left of theirs, the sum of 0.02 E - L, at most four rounds if the last call gained, two if one
  before it did, and else one; a round counts as half of p at least, because a busy machine may hold any round up for
  longer than its drafts cost.

A round of K drafts begins only if

    L + w(K) <= 0.02 E + C

**The bound.** Let S be the seconds of the call, P those of plain decoding, and o the largest overshoot of a round over
its estimate. The last drafted round began with L + w <= 0.02 E + C. Every live row emits at least one token in a round,
so the round replaced at least one plain step of the live rows, and after it L <= 0.02 E + C + o. Plain rounds do not
raise L: each costs p of the live rows and replaces a step of at least these. At the end all steps were replaced, so
S - P = L; and E <= S. Therefore, whatever was drafted,

    S <= (P + C + o) / 0.98

Each C but the first was left by earlier calls, of which one leaves nothing if it overdrew, and that by no more than its
o. Over many calls of a type the sum of S is therefore at most (sum of P + sum of o + C of the first call) / 0.98.

Why rows ahead count: if all rows go on plainly, a row that is d tokens ahead is in d steps fewer than plain decoding
has it in. With k_j rows in step j from here, and n_j in plain decoding's, k_j <= n_j, the differences sum up to the
tokens ahead, and p(n_j) - p(k_j) >= b (n_j - k_j).

**What lies outside.** Seconds count as the schedule measures them: in units of its own p, whose error it cannot know.
If all forwards become faster by less than 1.4 times, that lasts until p is measured again; if by more, a few rounds.
The preparation of a call, what a draft model that reads pictures takes for the prompt, the difference between a plain
round of this library and a step of transformers' own loop, and plain rounds of rows of different lengths (a few percent
slower than p) are not in it. Nor are pauses of the process and forwards that run for the first time, which may load
kernels or compile: a round counts as three times its estimate at most, and one of a size that was never measured as one
and a half times a plain step with its drafts.
"""

import math
from collections import Counter, deque
from typing import NamedTuple

from hf_speculate.schedule.base import RoundOutcome
from hf_speculate.schedule.costs import CostModel
from hf_speculate.schedule.progress import Progress

SHARE = 0.02  # share of a call's seconds that drafted rounds may lose
_MOST = 3.0  # times its estimate that a round counts as at most; a pause of the process may take a hundred times
_MOST_FIRST = 1.5  # times what is usual that the first round of a size counts as at most
_UNSETTLED = 8  # newest rounds whose p may still turn out to have been too high, see `MachineSpeed`


class _FirstRound(NamedTuple):
    """The first round of a size, which may load kernels or compile."""

    seconds: float
    expected_s: float
    num_rows: int
    num_steps: float  # plain steps that its drafts were expected to take
    read_s: float  # seconds in which the drafter was expected to read


class _Replaced(NamedTuple):
    """Plain steps that a round has replaced; fewer than none if it was plain and had more rows."""

    num_rows: int
    num_steps: int
    known_s: float  # p after the round, infinite if it was not known; the lower of this and of p now counts


class Budget:
    """The seconds of a call, those of its drafted rounds, and the plain steps that its rounds replaced.

    Args:
        costs: measures p(n).
        keeps_rows: whether finished rows stay in the batch.
    """

    def __init__(self, costs: CostModel, keeps_rows: bool = False):
        self.credit_s = 0.0  # C without the free round
        self.has_free_round = False  # whether the next drafted round may cost what it likes
        self.elapsed_s = 0.0  # E
        self.num_drafted = 0  # drafted rounds
        self._costs, self._keeps_rows = costs, keeps_rows
        self._progress = Progress(keeps_rows)
        self._drafted_s = 0.0  # as counted
        self._overshoot_s = 0.0  # the largest of a round that was not the first of its size
        self._paused_s = 0.0  # seconds of pauses in drafted rounds, which do not count
        self._newest: deque[_Replaced] = deque()
        self._settled_s = 0.0  # p of plain steps that older rounds have replaced, less those rounds that were plain
        self._most_rows = 0  # the most rows of a plain step that was replaced
        self._firsts: list[_FirstRound] = []  # without the free round
        self._free: _FirstRound | None = None
        self._unanswered_s = 0.0  # the most that the drafter took to propose nothing before the free round

    def add_plain(self, outcome: RoundOutcome, counted_s: float) -> None:
        """Add a round without drafts; E grows by `counted_s`, and what a drafter that found nothing took is lost."""
        self.elapsed_s += counted_s + outcome.draft_s
        self._drafted_s += outcome.draft_s
        if self.has_free_round:
            self._unanswered_s = max(self._unanswered_s, outcome.draft_s)
        self._replace(outcome, outcome.num_rows)

    def add_drafted(self, outcome: RoundOutcome, expected_s: float) -> None:
        """Add a drafted round that was expected to take `expected_s`."""
        seconds = min(outcome.seconds, _MOST * expected_s)
        self.elapsed_s += seconds
        self._overshoot_s = max(self._overshoot_s, seconds - expected_s)
        self.num_drafted += 1
        self._drafted_s += seconds
        self._paused_s += outcome.seconds - seconds
        self._replace(outcome)

    def add_first(self, outcome: RoundOutcome, expected_s: float, num_steps: float, read_s: float) -> None:
        """Add a drafted round of a size that was never measured.

        Args:
            outcome: of the round.
            expected_s: what it was expected to take.
            num_steps: plain steps that its drafts were expected to take.
            read_s: seconds in which the drafter was expected to read what it had not seen.
        """
        first = _FirstRound(outcome.seconds, expected_s, outcome.num_rows, num_steps, read_s)
        if self.has_free_round:
            self.has_free_round, self._free = False, first
        else:
            self._firsts.append(first)
        self.num_drafted += 1
        self._replace(outcome)

    @property
    def loss_s(self) -> float:
        """L; negative if drafting has gained."""
        spent_s = self._drafted_s + sum(map(self._counted_s, [*self._firsts, self._free]))
        price_s = {num_rows: self._p(num_rows) for num_rows in {replaced.num_rows for replaced in self._newest}}
        newest_s = sum(num_steps * min(known_s, price_s[rows]) for rows, num_steps, known_s in self._newest)
        lost_s = spent_s - self._settled_s - newest_s
        if not self._keeps_rows and self._most_rows:
            lost_s -= self._progress.num_ahead * self._costs.plain.least_row_s(self._most_rows)
        return lost_s

    def shortfall_s(self, extra_s: float) -> float:
        """Seconds that the call must grow by before a round may begin that loses `extra_s`; 0 if it may now."""
        if self.has_free_round:
            return 0.0
        return max((self.loss_s + extra_s - self.granted_s) / SHARE - self.elapsed_s, 0.0)

    @property
    def granted_s(self) -> float:
        """C, the free round once it was drafted included."""
        free_s = self._counted_s(self._free) - self._p(self._free.num_rows) if self._free else 0.0
        return self.credit_s + self._unanswered_s + free_s

    @property
    def overshoot_s(self) -> float:
        """o, the largest overshoot of a round over its estimate."""
        return max([self._overshoot_s, *(self._counted_s(first) - first.expected_s for first in self._firsts)])

    @property
    def uncounted_s(self) -> float:
        """Seconds of pauses in drafted rounds, and of first rounds of a size, that do not count."""
        firsts = [first for first in (*self._firsts, self._free) if first]
        return self._paused_s + sum(first.seconds - self._counted_s(first) for first in firsts)

    @property
    def left_s(self) -> float:
        """Seconds that the call leaves for later ones, 0.02 E - L; negative if it overdrew."""
        return SHARE * self.elapsed_s - self.loss_s

    def _replace(self, outcome: RoundOutcome, plain_rows: int = 0) -> None:
        """Count the plain steps that a round has replaced; one that was plain itself had `plain_rows`."""
        num_left = outcome.num_left or [1] * len(outcome.row_ids)
        num_emitted = outcome.num_emitted or [num + 1 for num in outcome.num_accepted]
        row_ids = outcome.row_ids
        if outcome.others:
            row_ids = [*row_ids, *(row.row_id for row in outcome.others)]
            num_emitted = [*num_emitted, *(row.num_emitted for row in outcome.others)]
            num_left = [*num_left, *(row.num_left for row in outcome.others)]
        steps = self._progress.advance(row_ids, num_emitted, num_left, outcome.num_rows)
        self._most_rows = max(self._most_rows, steps[0])
        if steps == [plain_rows]:  # a plain step for a plain step
            return
        counts = Counter(steps) if steps[0] != steps[-1] else {steps[0]: len(steps)}
        if plain_rows:
            counts[plain_rows] = counts.get(plain_rows, 0) - 1
        plain = self._costs.plain
        for num_rows, num in counts.items():
            if num:
                known_s = self._p(num_rows) if plain.is_known(num_rows) else math.inf
                self._newest.append(_Replaced(num_rows, num, known_s))
        while len(self._newest) > _UNSETTLED and plain.is_known(self._newest[0].num_rows):
            num_rows, num, known_s = self._newest.popleft()
            self._settled_s += num * min(known_s, self._p(num_rows))

    def _counted_s(self, first: _FirstRound | None) -> float:
        if first is None:
            return 0.0
        usual_s = self._p(first.num_rows) * (1 + first.num_steps) + first.read_s
        return min(first.seconds, _MOST_FIRST * usual_s)

    def _p(self, num_rows: int) -> float:
        return self._costs.counted_plain_s(num_rows)
