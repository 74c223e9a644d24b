"""Adaptive schedule: draft if drafting is expected to end the call sooner.

Free proposals (prompt lookup, a suffix store) are known before the round. Their width is chosen to
save the most time, net of its cost in the verification. A model or head drafts with the K that is
expected to end the call soonest, including the time to read its prompt. If no K gains anything, the
source is tried again after 4, 8, ... 256 plain steps, counted across calls.

One account for all calls of a type limits the loss from drafting to `LOSS_SHARE` of the counted
seconds plus `MAX_LOSS` plain steps. A round counts for at most twice its expected seconds, and
reading a prompt for no more than expected. Pauses of the process and the first forwards of a
compiled size are therefore not counted in full. A plain step counts with its last measured time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hf_speculate.schedule.acceptance import DraftedRow
from hf_speculate.schedule.base import PLAIN_STEP, Choice, RoundOutcome, RowAhead, Schedule
from hf_speculate.schedule.costly import RoundCosts, best_length
from hf_speculate.schedule.costs import TUNING as COST_TUNING
from hf_speculate.schedule.free import FIRST_PACE, best_width, row_worths
from hf_speculate.schedule.memory import FIRST_WAIT, ScheduleMemory

LOSS_SHARE = 0.02  # maximum long-run loss as a share of the counted seconds
MAX_LOSS = 24.0  # maximum loss beyond this share, in plain steps
MAX_GAIN = 96.0  # maximum balance in plain steps, which pays for reading long prompts


@dataclass(frozen=True)
class Tuning:
    """Weights for choosing a draft.

    Chosen from the table of means in tests/schedule/laboratory.
    """

    max_wait: int = 256  # maximum number of plain steps between trials
    paying_wait: int = 32  # the same while past gains pay for trials
    least_trial_gain: float = 1.1  # minimum optimistic estimate of the gain for a trial
    pace_weight: float = 0.05  # weight of the newest round in the pace
    row_weight: float = 0.1  # weight of the newest round in a row's pace


TUNING = Tuning()


class AdaptiveSchedule(Schedule):
    """Schedule based on measured seconds and acceptance rates.

    Args:
        memory: Estimates and account for calls of this type.
        max_model_tokens: Maximum number of tokens drafted by a model or head; 0 if all proposals
            are free.
        refills_rows: Whether new rows replace finished ones. All tokens of a round then have the
            same value.
    """

    def __init__(
        self, memory: ScheduleMemory, max_model_tokens: int, refills_rows: bool = False
    ) -> None:
        self.memory = memory
        self._max_model_tokens, self._refills_rows = max_model_tokens, refills_rows
        self._rows: Sequence[RowAhead] = ()  # rows of the latest choice
        self._choice = PLAIN_STEP
        self._num_unread = 0
        self._paces: dict[int, float] = {}  # recent number of tokens per round, by row
        self._is_trial_open = False  # whether the last drafted round was a trial

    def begin(self, prefill_s: float, num_read: int) -> None:
        with self.memory.lock:
            self.memory.costs.begin(prefill_s, num_read)

    def choose(
        self, rows: Sequence[RowAhead], num_rows: int, max_tokens: int, num_unread: int = 0
    ) -> Choice:
        self._rows, self._num_unread = rows, num_unread
        with self.memory.lock:
            self._choice = self._choose(num_rows, max_tokens)
        return self._choice

    def update(self, outcome: RoundOutcome) -> None:
        with self.memory.lock:
            self._learn(outcome)

    def _choose(self, num_rows: int, max_tokens: int) -> Choice:
        costs = self.memory.costs
        if costs.plain_s(num_rows) is None or costs.is_plain_due:
            return PLAIN_STEP
        lengths = range(1, max_tokens + 1)
        choice, saved_s = self._best(num_rows, lengths)
        num_drafted = choice.num_draft_tokens
        is_new = num_drafted and not costs.is_measured(num_rows, num_drafted)
        if self.memory.compiles_sizes and is_new:
            choice = self._compiled(num_rows, lengths, choice, saved_s)
        if self._can_afford(num_rows, choice):
            return choice
        if choice.is_trial:
            self.memory.num_plain = 0
        choice = Choice(self._best_width(num_rows, lengths)[0])  # free proposals only
        return choice if self._can_afford(num_rows, choice) else PLAIN_STEP

    def _best(self, num_rows: int, lengths: Sequence[int]) -> tuple[Choice, float]:
        """Return the best draft among these lengths and the time it saves per plain step, in s."""
        step_s = self.memory.costs.plain_s(num_rows)
        if not lengths or step_s is None:
            return PLAIN_STEP, 0.0
        width, saved_s = self._best_width(num_rows, lengths)
        num_tokens, gain, is_trial = self._choose_length(num_rows, lengths)
        if (
            num_tokens
            and width
            and not is_trial
            and not self._outweighs(num_rows, num_tokens, saved_s)
        ):
            num_tokens = 0
        if not num_tokens:
            return Choice(width), saved_s
        return Choice(num_tokens, num_tokens, is_trial), step_s * (1 - 1 / gain)

    def _best_width(self, num_rows: int, lengths: Sequence[int]) -> tuple[int, float]:
        """Return the best width for free proposals and the time it saves, in seconds."""
        verifications_s = self.memory.costs.verifications_s(num_rows)
        return best_width(
            self._rows, self._worths(), self._token_s(num_rows), verifications_s, lengths
        )

    def _worths(self) -> list[float]:
        """Return how many plain steps one more token of each row saves, [N]."""
        rows = self._rows
        return [1 / len(rows)] * len(rows) if self._refills_rows else row_worths(rows, self._paces)

    def _token_s(self, num_rows: int) -> float:
        """Return the value of a plain step in seconds at the recent pace."""
        return (self.memory.costs.plain_s(num_rows) or 1.0) / max(self.memory.pace, 1.0)

    def _choose_length(self, num_rows: int, lengths: Sequence[int]) -> tuple[int, float, bool]:
        """Return K for a model or head, its gain and whether the round is a trial."""
        memory, costs = self.memory, self.memory.costs
        num_left = max(row.num_left for row in self._rows)
        max_tokens = min(self._max_model_tokens, num_left - 1)
        lengths = [draft_len for draft_len in lengths if draft_len <= max_tokens]
        step_s = costs.plain_s(num_rows)
        if not lengths or step_s is None:
            return 0, 1.0, False
        rounds_s = list(
            map(float.__add__, costs.verifications_s(num_rows), costs.drafts_s(num_rows))
        )
        read_s = costs.read_s(num_rows, self._num_unread)
        round_costs = RoundCosts(step_s, rounds_s, read_s)
        probabilities = memory.acceptance.probabilities()
        best, gain = best_length(probabilities, num_left, round_costs, lengths)
        if gain > 1.0:
            return best, gain, False
        max_wait = TUNING.paying_wait if memory.account > 0 else TUNING.max_wait
        if memory.num_plain < min(memory.wait, max_wait):
            return 0, 1.0, False
        probabilities = memory.acceptance.probabilities(is_optimistic=True)
        best, gain = best_length(probabilities, num_left, round_costs, lengths)
        return (best, gain, True) if gain > TUNING.least_trial_gain else (0, 1.0, False)

    def _outweighs(self, num_rows: int, num_tokens: int, saved_s: float) -> bool:
        """Return whether a draft from the model saves more than free proposals alone.

        In a round with such a draft, each row uses the better of the two.
        """
        costs = self.memory.costs
        expected = sum(self.memory.acceptance.probabilities()[:num_tokens])
        tokens = [max(sum(row.proposed[:num_tokens]), expected) for row in self._rows]
        both_s = self._token_s(num_rows) * sum(map(float.__mul__, self._worths(), tokens))
        verifications_s = costs.verifications_s(num_rows)
        both_s -= verifications_s[num_tokens] - verifications_s[0]
        both_s -= costs.drafts_s(num_rows)[num_tokens] + costs.read_s(num_rows, self._num_unread)
        return both_s > saved_s

    def _compiled(
        self, num_rows: int, lengths: Sequence[int], choice: Choice, saved_s: float
    ) -> Choice:
        """Return a draft of a compiled size, or a new size if missed savings cover its start-up."""
        memory, costs = self.memory, self.memory.costs
        compiled = [draft_len for draft_len in lengths if costs.is_measured(num_rows, draft_len)]
        other, other_saved_s = self._best(num_rows, compiled)
        if choice.is_trial and compiled:
            return other  # one size is enough to detect a source without gain
        size = num_rows, costs.size_of(choice.num_draft_tokens)
        memory.missed_s[size] = memory.missed_s.get(size, 0.0) + max(saved_s - other_saved_s, 0.0)
        return choice if memory.missed_s[size] >= costs.start_s else other

    def _can_afford(self, num_rows: int, choice: Choice) -> bool:
        """Return whether the account stays above its limit even if the whole draft is rejected."""
        if not choice.num_draft_tokens:
            return True
        step_s = self.memory.costs.plain_s(num_rows) or 1.0
        max_s = self._max_s(num_rows, choice.num_draft_tokens, choice.num_model_tokens)
        return self.memory.account - max_s / step_s >= -MAX_LOSS

    def _max_s(self, num_rows: int, num_drafted: int, num_tokens: int) -> float:
        """Return the maximum number of seconds to count for a round."""
        costs, read_s = self.memory.costs, 0.0
        seconds = costs.verifications_s(num_rows)[num_drafted]
        if num_tokens:
            seconds += costs.drafts_s(num_rows)[num_tokens]
            read_s = costs.read_s(num_rows, self._num_unread)
        return COST_TUNING.max_factor * seconds + read_s

    def _learn(self, outcome: RoundOutcome) -> None:
        memory, num_rows = self.memory, outcome.num_rows
        costs, num_drafted = memory.costs, outcome.num_draft_tokens
        num_tokens = outcome.num_model_tokens
        if costs.plain_s(num_rows) is not None:
            self._book(outcome)
        costs.add_verification(num_rows, num_drafted, outcome.score_s + outcome.other_s)
        if num_tokens:
            costs.add_draft(num_rows, num_tokens, outcome.num_fed, outcome.draft_s)
            num_left = {row.row_id: row.num_left for row in self._rows}
            memory.acceptance.observe(
                [
                    DraftedRow(row.num_accepted, min(num_tokens, num_left[row.row_id] - 1))
                    for row in outcome.rows
                    if row.is_model
                ]
            )
        else:
            memory.num_plain += 1
            memory.acceptance.observe_plain()
        self._count_trial(num_tokens)
        for row in () if self._refills_rows else outcome.rows:
            pace = self._paces.get(row.row_id, FIRST_PACE)
            self._paces[row.row_id] = pace + TUNING.row_weight * (row.num_emitted - pace)

    def _count_trial(self, num_tokens: int) -> None:
        """Double the wait if no draft follows a trial; reset the wait after a good trial."""
        memory, is_trial = self.memory, self._choice.is_trial and num_tokens > 0
        if self._is_trial_open and not is_trial:
            memory.wait = FIRST_WAIT if num_tokens else min(2 * memory.wait, TUNING.max_wait)
        if is_trial:
            if self._is_trial_open:
                memory.wait = min(2 * memory.wait, TUNING.max_wait)
            memory.num_plain = 0
        self._is_trial_open = is_trial

    def _book(self, outcome: RoundOutcome) -> None:
        """Add the gain of a round to the account and update the pace."""
        memory, num_rows = self.memory, outcome.num_rows
        step_s = memory.costs.plain_s(num_rows) or 1.0
        num_drafted, num_tokens = outcome.num_draft_tokens, outcome.num_model_tokens
        took_steps = min(outcome.seconds, self._max_s(num_rows, num_drafted, num_tokens)) / step_s
        gained_steps = 0.0
        if num_drafted or num_tokens:
            gained_steps = self._num_steps(outcome) - took_steps
            pace = (gained_steps + took_steps) / max(took_steps, 1e-9)
        else:
            pace = 1.0
        memory.pace += TUNING.pace_weight * (pace - memory.pace)
        memory.account = min(memory.account + gained_steps + LOSS_SHARE * took_steps, MAX_GAIN)

    def _num_steps(self, outcome: RoundOutcome) -> float:
        """Return how many plain steps a round replaces, for the longest row or on average."""
        num_emitted = {row.row_id: row.num_emitted for row in outcome.rows}
        if self._refills_rows:
            return sum(num_emitted.values()) / outcome.num_rows
        left = [(row.num_left, num_emitted.get(row.row_id, 1)) for row in self._rows]
        return max(before for before, _ in left) - max(before - emitted for before, emitted in left)
