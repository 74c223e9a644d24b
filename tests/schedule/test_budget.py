"""The bound of the adaptive schedule: what calls take at most against plain decoding, whatever is drafted."""

import random
from collections.abc import Sequence
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_speculate.schedule import AdaptiveSchedule, DraftPrior, HistoryStore, RoundOutcome, RowGain, ScheduleHistory
from hf_speculate.schedule.acceptance import AcceptanceModel
from hf_speculate.schedule.budget import Budget
from hf_speculate.schedule.costs import CostModel
from hf_speculate.schedule.history import ScheduleEstimates
from hf_speculate.schedule.plain_steps import PlainSteps
from hf_speculate.schedule.progress import Progress
from tests.schedule.simulator import Machine, plain_rounds_s, run

MAX_DRAFT_TOKENS = 10
SHARE = 0.02  # of a call's seconds that drafts may lose
ROUNDING = 1e-6
JUMP = 0.015  # of the seconds of a call, for the rounds before a jump of the machine's speed is noticed
NOISE = 0.03  # of p: a mean of as few as two steps that vary by a twelfth


class LongDraftsFail:
    """A row whose drafts of one token are accepted, and longer ones are not."""

    def __getitem__(self, places: slice) -> list[bool]:
        return [places.stop - places.start == 1]


class EveryOtherFails:
    """A row that accepts all of one draft and nothing of the next."""

    def __init__(self) -> None:
        self._accepts = False

    def __getitem__(self, places: slice) -> list[bool]:
        self._accepts = not self._accepts
        return [self._accepts] * (places.stop - places.start)


def row(*parts: tuple[int, float], seed: int = 0) -> list[bool]:
    """A trace of parts, each with a number of tokens and an acceptance rate; the last one goes on."""
    rng = random.Random(seed)
    lens = [*(num for num, _ in parts[:-1]), 400]
    return [rng.random() < share for num, (_, share) in zip(lens, parts, strict=True) for _ in range(num)]


USELESS, GOOD = row((0, 0.0)), row((0, 0.85))
# Rows, and the tokens of each.
ADVERSARIES = {
    "useless": ([USELESS], [120]),
    "good for a while, then useless": ([row((50, 0.95), (0, 0.0))], [160]),
    "useless, then good, then useless": ([row((40, 0.0), (40, 0.95), (0, 0.0))], [160]),
    "useless in some rows": ([GOOD, USELESS, GOOD, GOOD], [80] * 4),
    "rows that end early": ([GOOD, GOOD, USELESS, GOOD], [5, 30, 31, 100]),
    "the useless row ends first": ([GOOD, GOOD, GOOD, USELESS], [100, 80, 100, 30]),
    "a batch that shrinks": ([row((20, 0.9), (0, 0.0), seed=seed) for seed in range(8)], list(range(15, 135, 15))),
    "long drafts fail": ([LongDraftsFail()], [120]),
    "every other draft fails": ([EveryOtherFails(), EveryOtherFails()], [120, 90]),
}
# Machines, and a draft step's share of the bytes that a plain step reads.
PAIRS = {
    "cheap": (Machine(step_s=0.2, prompt_s=0.4), 0.2),
    "half the target": (Machine(step_s=0.5, prompt_s=1.0), 0.5),
    "as expensive as the target": (Machine(step_s=1.0, prompt_s=2.0), 0.9),
    "far more expensive than its bytes": (Machine(step_s=1.5, prompt_s=3.0), 0.1),
    "rows cost": (Machine(step_s=0.3, forward_s=lambda num_query: 0.6 + 0.4 * num_query), 0.3),
    "a long prompt": (Machine(step_s=0.3, prompt_s=10.0, prefill_s=30.0), 0.3),
    "expensive to catch up with": (Machine(step_s=0.2, read_s=0.1), 0.2),
}
# Some first rounds of a size do not count in full, because they are far more expensive than what is usual.
UNUSUAL = ("far more expensive than its bytes", "rows cost", "a long prompt", "expensive to catch up with")


def history_of_plain_steps(machine: Machine, ratio: float, num_rows: int) -> ScheduleHistory:
    """A history that knows p of every number of rows, so that the schedule's own p is the machine's."""
    costs = CostModel(DraftPrior(ratio))
    for rows in range(1, num_rows + 1):
        for _ in range(2):
            costs.observe(RoundOutcome(range(rows), [0] * rows, [0] * rows, 0, rows, score_s=machine.plain_s(rows)))
    history = ScheduleHistory(HistoryStore(), None, "call")
    history.remember(ScheduleEstimates(AcceptanceModel(MAX_DRAFT_TOKENS), costs, {}))
    return history


def assert_bounded(
    rows, lens: Sequence[int], machine: Machine, ratio: float, num_calls: int, keeps_rows: bool = False
) -> list[Budget]:
    """Each of the calls that follow each other keeps the bound, and so does their sum; the budgets of the calls."""
    history, budgets, total_s = history_of_plain_steps(machine, ratio, len(rows)), [], 0.0
    plain_s = machine.prefill_s + plain_rounds_s(machine, lens, keeps_rows)
    for number in range(num_calls):
        schedule = AdaptiveSchedule(MAX_DRAFT_TOKENS, DraftPrior(ratio), history, len(rows), keeps_rows)
        done, budget = run(schedule, rows, machine, lens, number, keeps_rows), schedule.budget
        seconds = machine.prefill_s + done.seconds - budget.uncounted_s
        assert seconds <= (plain_s + budget.granted_s + budget.overshoot_s) / (1 - SHARE) + ROUNDING
        budgets.append(budget)
        total_s += seconds
    overshoot_s = sum(budget.overshoot_s for budget in budgets)
    assert total_s <= (num_calls * plain_s + budgets[0].granted_s + overshoot_s) / (1 - SHARE) + ROUNDING
    return budgets


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", ADVERSARIES)
def test_neither_a_call_nor_many_take_longer_than_the_bound(name, pair):
    machine, ratio = PAIRS[pair]
    budgets = assert_bounded(*ADVERSARIES[name], machine, ratio, num_calls=4)
    assert pair in UNUSUAL or max(budget.uncounted_s for budget in budgets) < 0.01 * budgets[0].elapsed_s


def test_rows_that_stay_when_they_have_ended_save_plain_decoding_nothing():
    rows, machine = [GOOD, GOOD, GOOD, USELESS], Machine(step_s=0.1, forward_s=lambda num_query: 0.2 + 0.2 * num_query)
    assert_bounded(rows, [160] * 4, machine, 0.1, num_calls=4, keeps_rows=True)


@settings(max_examples=60)
@given(data=st.data())
def test_the_bound_holds_for_any_trace_and_any_costs_that_are_exact(data):
    num_rows = data.draw(st.integers(1, 5))
    part = st.tuples(st.integers(0, 60), st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]))
    rows = [row(*data.draw(st.lists(part, min_size=1, max_size=4)), seed=seed) for seed in range(num_rows)]
    lens = [data.draw(st.integers(1, 80)) for _ in rows]
    base, slope = data.draw(st.floats(0.0, 1.0)), data.draw(st.floats(0.0, 0.5))
    step_s, prefill_s = data.draw(st.floats(0.01, 1.5)), data.draw(st.floats(0.0, 10.0))
    machine = Machine(
        step_s=step_s,
        forward_s=lambda num_query: 0.1 + base + slope * num_query,
        prompt_s=step_s * prefill_s,
        read_s=data.draw(st.floats(0.0, 0.1)),
        prefill_s=prefill_s,
    )
    assert_bounded(rows, lens, machine, data.draw(st.floats(0.01, 0.99)), 2, keeps_rows=data.draw(st.booleans()))


@pytest.mark.parametrize("machine", [Machine(0.2, jitter=0.08), Machine(0.5, jitter=0.08, pause_rate=0.02)])
@pytest.mark.parametrize("name", ADVERSARIES)
def test_noise_and_pauses_of_the_process_cost_little_more(name, machine):
    rows, lens = ADVERSARIES[name]
    history = history_of_plain_steps(machine, machine.step_s, len(rows))
    for number in range(4):
        schedule = AdaptiveSchedule(MAX_DRAFT_TOKENS, DraftPrior(machine.step_s), history, len(rows))
        done, budget = run(schedule, rows, machine, lens, number), schedule.budget
        plain_s = machine.prefill_s + (1 + NOISE) * plain_rounds_s(machine, lens)
        seconds = machine.prefill_s + done.seconds - done.paused_s
        assert seconds <= (plain_s + budget.granted_s + budget.overshoot_s) / (1 - SHARE)


# How the machine's speed changes, or all forwards with the context, by tokens of the shortest live row.
JUMPS = {
    "half as fast": lambda num_tokens: 2.0 if num_tokens >= 60 else 1.0,
    "twice as fast": lambda num_tokens: 0.5 if num_tokens >= 60 else 1.0,
    "to and fro": lambda num_tokens: 1.0 + num_tokens // 40 % 2,
    "slower and slower": lambda num_tokens: 1.0 + num_tokens / 100,
}


@pytest.mark.parametrize("jump", JUMPS)
@pytest.mark.parametrize(
    "pair", ["cheap", "half the target", "as expensive as the target", "expensive to catch up with"]
)
def test_a_machine_that_becomes_faster_or_slower_exceeds_the_bound_by_little(jump, pair):
    machine, ratio = PAIRS[pair]
    machine = machine._replace(slowness=JUMPS[jump])
    for rows, lens in ADVERSARIES.values():
        history = history_of_plain_steps(machine, ratio, len(rows))
        for number in range(4):
            schedule = AdaptiveSchedule(MAX_DRAFT_TOKENS, DraftPrior(ratio), history, len(rows))
            done, budget = run(schedule, rows, machine, lens, number), schedule.budget
            plain_s = machine.prefill_s + plain_rounds_s(machine, lens)
            seconds = machine.prefill_s + done.seconds - budget.uncounted_s
            most_s = (plain_s + budget.granted_s + budget.overshoot_s) / (1 - SHARE)
            assert seconds <= (1 + JUMP) * most_s


# Gemma 3 270M on two cores, in plain steps of one row: a draft half as expensive, and its own first 6 of 18 layers.
REAL_FORWARD = {1: 1.0, 2: 1.06, 4: 1.15, 6: 1.25, 11: 1.5}
REAL_PAIRS = {
    "half the target": Machine(0.5, lambda num: 0.94 + 0.052 * num, 0.01, prompt_s=2.0, prefill_s=4.0),
    "early exit": Machine(0.6, lambda num: 0.94 + 0.052 * num, 0.01, prompt_s=1.6, prefill_s=4.0),
}


@pytest.mark.parametrize(
    ("num_tokens", "least", "least_mean"), [(64, 0.955, 0.98), (128, 0.96, 0.985), (256, 0.965, 0.985)]
)
@pytest.mark.parametrize("pair", REAL_PAIRS)
def test_a_useless_draft_costs_ten_calls_of_a_real_model_one_and_a_half_percent(pair, num_tokens, least, least_mean):
    """All of them took 4 to 9 % longer than plain decoding, when trials were paid from no budget."""
    machine, history = REAL_PAIRS[pair], ScheduleHistory(HistoryStore(), None, "call")
    shares = []
    for number in range(10):
        schedule = AdaptiveSchedule(MAX_DRAFT_TOKENS, DraftPrior(machine.step_s), history)
        done = run(schedule, [USELESS], machine, num_tokens, number)
        shares.append((machine.prefill_s + plain_rounds_s(machine, [num_tokens])) / (machine.prefill_s + done.seconds))
    assert min(shares[1:]) >= least
    assert prod(shares) ** 0.1 >= least_mean


def test_progress_is_that_of_the_row_that_is_furthest_behind():
    progress = Progress()
    assert progress.advance([0, 1, 2], [3, 1, 2], [9, 9, 9], 3) == [3]
    assert progress.num_ahead == 3
    assert progress.advance([0, 1, 2], [1, 4, 1], [9, 9, 9], 3) == [3, 3]  # rows of 4, 5 and 3 tokens
    assert progress.advance([0, 1, 2], [1, 1, 1], [0, 0, 9], 3) == [3]  # 5, 6 and 4: two have ended ahead
    assert progress.num_ahead == 3
    assert progress.advance([2, 7], [1, 1], [9, 9], 2) == [4]  # the two that are live, and the two that have ended
    assert progress.advance([7], [1], [9], 1) == [2]  # one was cancelled
    assert progress.advance([7], [2], [0], 1) == [1, 1]


def test_rows_that_stay_in_the_batch_are_in_plain_steps_too():
    progress = Progress(keeps_rows=True)
    assert progress.advance([0, 1], [2, 1], [0, 9], 2) == [2]
    assert progress.advance([1], [4], [9], 2) == [2] * 4


def test_a_row_that_the_drafter_cannot_serve_holds_back_what_a_round_replaces():
    costs = history_of_plain_steps(Machine(), 0.1, 2).recall().costs
    budget, p_s = Budget(costs), costs.counted_plain_s(2)
    outcome = RoundOutcome([0], [4], [4], 4, 2, [9], 1, 0.4, 1.0, num_emitted=[5], others=[RowGain(1, 1, 9)])
    budget.add_drafted(outcome, 1.4)
    assert budget.loss_s == pytest.approx(1.4 - p_s - 4 * costs.plain.least_row_s(2))  # one step, and four ahead


@given(data=st.data())
def test_replaced_steps_add_up_to_those_of_plain_decoding(data):
    lens = dict(enumerate(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))))
    progress, counts, steps = Progress(), dict.fromkeys(lens, 0), []
    while counts:
        emitted = {index: min(data.draw(st.integers(1, 5)), lens[index] - num) for index, num in counts.items()}
        counts = {index: num + emitted[index] for index, num in counts.items()}
        left = [lens[index] - num for index, num in counts.items()]
        steps += progress.advance(list(counts), list(emitted.values()), left, len(counts))
        counts = {index: num for index, num in counts.items() if num < lens[index]}
    assert steps == [sum(length > step for length in lens.values()) for step in range(max(lens.values()))]


def test_p_is_a_mean_of_steps_on_a_line_between_numbers_of_rows():
    plain = PlainSteps()
    for num_rows, seconds in ((1, 1.0), (1, 1.2), (1, 30.0), (5, 2.1), (5, 2.1)):
        plain.add(num_rows, seconds, 0)
    assert plain.seconds(1) == pytest.approx(1.1)  # without the pause
    assert plain.seconds(3) == plain.counted_s(3) == pytest.approx(1.6)
    assert plain.seconds(9) == pytest.approx(2.1)
    assert plain.least_row_s(5) == pytest.approx(0.25)
    assert plain.least_row_s(9) == 0.0  # nobody knows what more rows cost
    assert [num_rows for num_rows in range(1, 13) if plain.is_known(num_rows)] == list(range(1, 11))


def test_three_steps_in_a_row_say_that_the_machine_has_become_faster_or_slower():
    for factor in (0.5, 2.0):
        plain = PlainSteps()
        for seconds in (1.0, 1.1, 1.0, 1.1, 1.0, factor, factor):
            plain.add(1, seconds, 0)
        assert plain.seconds(1) != pytest.approx(factor, rel=0.1)
        plain.add(1, factor, 0)
        assert plain.seconds(1) == pytest.approx(factor)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_three_of_five_rounds_say_that_the_machine_has_become_faster_or_slower(factor):
    """Plain steps are then measured anew, and what other lengths take is scaled."""
    costs = CostModel(DraftPrior(0.1))
    for score_s in (1.0, 1.0):
        costs.observe(RoundOutcome([0], [0], [0], 0, 1, score_s=score_s))
    for number in range(16):
        seconds = factor if number > 10 else 1.0
        for num in (2, 6) if number < 10 else (2,):
            costs.observe(
                RoundOutcome([0], [num], [num], num, 1, num_fed=1, draft_s=0.1 * num * seconds, score_s=seconds)
            )
        assert costs.plain.is_measured is (number < 13)
    assert costs.rounds_s(1, 6)[6] == pytest.approx(1.6 * factor, rel=0.05)


def test_p_is_no_longer_than_a_verification_by_now():
    costs = CostModel(DraftPrior(0.1))
    for _ in range(2):
        costs.observe(RoundOutcome([0], [0], [0], 0, 1, score_s=2.0))
    costs = costs.recent()
    for _ in range(3):
        assert costs.counted_plain_s(1) == 2.0
        costs.observe(RoundOutcome([0], [2], [2], 2, 1, num_fed=1, draft_s=0.2, score_s=1.0))
    assert costs.counted_plain_s(1) == 1.0
    for _ in range(2):  # it is the path of plain steps that is slow
        costs.observe(RoundOutcome([0], [0], [0], 0, 1, score_s=2.0))
    assert costs.counted_plain_s(1) == 2.0


def test_a_single_step_counts_as_less_and_one_row_is_measured_by_itself():
    plain = PlainSteps()
    plain.add(2, 1.0, 0)
    assert (plain.seconds(2), plain.counted_s(2)) == (1.0, 0.7)
    assert not plain.is_known(2)
    plain.add(2, 1.0, 0)
    assert plain.is_known(2)
    assert not plain.is_known(1)
    assert not plain.is_stale(2, 200)
    assert plain.is_stale(2, 201)


def test_the_first_draft_is_one_token_if_drafts_are_dear_or_their_cost_is_not_known():
    priors = [DraftPrior(0.3), DraftPrior(0.31), DraftPrior(None), DraftPrior(0.1, is_verification_known=False)]
    lens = [run(AdaptiveSchedule(10, prior), [GOOD], Machine(), 64).draft_lens[0] for prior in priors]
    assert lens == [3, 1, 1, 1]
    at_once = AdaptiveSchedule(10, DraftPrior(0.2, is_parallel=True))
    assert run(at_once, [GOOD], Machine(), 64).draft_lens[0] == 5
    assert not DraftPrior(1.2, is_parallel=True).never_pays
    assert DraftPrior(1.2).never_pays
