"""The adaptive schedule: the draft length with the highest estimated throughput that the call's budget pays for.

A call takes at most (plain decoding + C + o) / 0.98 of the seconds, whatever is drafted: `schedule.budget` states the
inequality, what C and o are, why the bound holds, and what lies outside.
"""

from hf_speculate.schedule.acceptance import AcceptanceModel
from hf_speculate.schedule.base import RoundOutcome, Schedule
from hf_speculate.schedule.budget import Budget
from hf_speculate.schedule.call_state import CallState
from hf_speculate.schedule.costs import CostModel
from hf_speculate.schedule.history import CallRecord, ScheduleEstimates, ScheduleHistory
from hf_speculate.schedule.options import Options
from hf_speculate.schedule.prior import DraftPrior
from hf_speculate.schedule.states import Choice, Drafting, Plain, Resting, State, Waits

# Tuned on the simulated and recorded traces of tests/schedule.
_CREDIT_ROUNDS = 4  # after a call that gained: first rounds that are rejected at once then rarely end drafting
_CREDIT_STEPS = 0.5  # plain steps that such a round counts as at least: a busy machine may hold one up for longer
_FIRST_CREDIT = 0.5  # plain steps that drafted rounds may cost on credit in a type's first call, after the first one
_MOST_TIMES = 3.0  # the mean that a plain round counts as at most, as time that the call has taken
_LONG_PROMPT = 8  # unread prompt tokens per token to come from which a plain step is measured before the first draft


class AdaptiveSchedule(Schedule):
    """Drafts the K in 0..K_max with the most expected tokens per second, from measured seconds and acceptance.

    If plain steps are fastest, K is 0 until a trial of one round. The wait before a trial doubles with every trial that
    did not pay; after useless calls most calls try nothing. A draft that costs as much as the target is never tried:
    K drafts and a verification cost more than the K + 1 plain steps that they replace at best.

    Args:
        max_draft_tokens: K_max, >= 1.
        prior: what is known of the draft source before its first round.
        history: estimates of earlier calls of this type; None keeps nothing.
        num_rows: B of the first round.
        keeps_rows: whether finished rows stay in the batch.
    """

    def __init__(
        self,
        max_draft_tokens: int,
        prior: DraftPrior,
        history: ScheduleHistory | None = None,
        num_rows: int = 1,
        keeps_rows: bool = False,
    ):
        self._prior, self._num_rows = prior, num_rows
        self._history, known = history, history and history.recall()
        acceptance, costs, self._records = known or ScheduleEstimates(
            AcceptanceModel(max_draft_tokens), CostModel(prior), {}
        )
        self._record = self._records.get(num_rows.bit_length(), CallRecord())
        budget = Budget(costs, keeps_rows)
        self._call = CallState(max_draft_tokens, prior, acceptance, costs, budget)
        self._state: State = Plain()
        self._is_remembered = True  # whether the history has all estimates of the call
        self.num_draft_tokens = 0

    @property
    def budget(self) -> Budget:
        """The budget of drafted rounds."""
        return self._call.budget

    def begin(self, prefill_s: float, num_read: int, num_unread: int, num_left: int) -> None:
        """Choose the first K: in the first call of a type a draft, in later ones what paid before."""
        call, record = self._call, self._record
        call.costs.begin(prefill_s, num_read)
        call.budget.elapsed_s = prefill_s
        call.num_unread, call.num_prompt = num_unread, min(num_unread, num_read)
        if self._prior.never_pays or num_left < 1:
            return
        is_long = num_unread > _LONG_PROMPT * num_left
        # until it was measured, the draft's prefill is not known well: the target's may have been the first of all
        call.counts_prompt = is_long or call.costs.has_reads
        options = Options(call, self._num_rows, dict.fromkeys(range(self._num_rows), num_left))
        if record.is_new:
            call.budget.has_free_round = True
            if options.best and not is_long:
                self._choose(Choice(Drafting(num_rounds=1), options.affordable(options.best)))
        elif record.rests:
            self._state = Resting()
        else:
            num_rounds = _CREDIT_ROUNDS if record.has_gained else 2 if record.gained_s else 1
            least_s = _CREDIT_STEPS * call.costs.counted_plain_s(self._num_rows)
            round_s = max(options.extra_s(max(options.best, 1)) - options.read_s, least_s)
            call.budget.credit_s = min(record.account_s, options.read_s + num_rounds * round_s)
            self._choose(Drafting(Waits.after(record)).next(options))

    def update(self, outcome: RoundOutcome) -> None:
        """Learn from a round and choose the next K."""
        if self._prior.never_pays:
            return
        call, num = self._call, outcome.num_draft_tokens
        num_left = outcome.num_left or [1] * len(outcome.row_ids)
        left_of = {row: left for row, left in zip(outcome.row_ids, num_left, strict=True) if left > 0}
        self._is_remembered = False
        has_drafted = num > 0 and any(outcome.num_drafted)
        self._account(outcome)
        if has_drafted or not num:  # if no draft counted, its drafter has failed, and tells nothing
            call.costs.observe(outcome, has_read_prompt=call.num_prompt > 0)
        if has_drafted:
            call.num_last = num
            call.acceptance.observe(outcome.row_ids, outcome.num_accepted, num)
        call.num_unread, call.num_prompt = (0, 0) if outcome.num_fed else (call.num_unread + 1, call.num_prompt)
        if left_of:
            self._grant_first_credit(outcome.num_rows)
            is_vain = self.num_draft_tokens > 0 and not has_drafted
            self._choose(self._state.next(Options(call, outcome.num_rows, left_of, is_vain)))
        else:
            self.end()

    def end(self) -> None:
        """Keep the estimates for the next call."""
        if self._history is None or self._is_remembered:
            return
        self._is_remembered = True
        call = self._call
        record = self._record.after(call.budget, self._state.expects_gain)
        records = {**self._records, self._num_rows.bit_length(): record}
        self._history.remember(ScheduleEstimates(call.acceptance, call.costs, records))

    def _account(self, outcome: RoundOutcome) -> None:
        """Add a round to the budget, before its seconds change any estimate."""
        call, num_rows, num = self._call, outcome.num_rows, outcome.num_draft_tokens
        costs = call.costs
        if not num:
            # before p is known, the first forward of its size may take far longer than the others
            longest_s = _MOST_TIMES * costs.plain_s(num_rows) if costs.plain.is_known(num_rows) else 0.0
            call.budget.add_plain(outcome, min(outcome.score_s + outcome.other_s, longest_s))
            return
        read_s = costs.read_s(num_rows, call.num_unread, call.num_prompt)
        expected_s = costs.rounds_s(num_rows, max(num, call.max_draft_tokens))[num] + read_s
        if call.budget.has_free_round or not costs.is_tried(num_rows, num):
            call.budget.add_first(outcome, expected_s, self._prior.draft_steps(num), read_s)
        else:
            call.budget.add_drafted(outcome, expected_s)

    def _grant_first_credit(self, num_rows: int) -> None:
        """In the first call of a type, more rounds if drafts are cheap: the first ones may be rejected by bad luck."""
        call, budget = self._call, self._call.budget
        is_due = self._record.is_new and budget.num_drafted and not budget.credit_s and not self._prior.is_expensive
        if is_due and call.costs.plain.is_known(num_rows):
            rounds_s = call.costs.rounds_s(num_rows, call.max_draft_tokens)
            round_s = rounds_s[min(call.num_last, call.max_draft_tokens)] - rounds_s[0]
            least_s = round_s if self._prior.first_draft_tokens > 1 else 0.0
            budget.credit_s = max(_FIRST_CREDIT * rounds_s[0], least_s)

    def _choose(self, choice: Choice) -> None:
        self._state, self.num_draft_tokens = choice
        self.is_probe = self._state.is_trial
