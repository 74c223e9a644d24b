"""Schedules; the adaptive one against the best constant number and plain decoding, on traces and machines."""

import gc
import json
import weakref
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from torch.nn import Identity

from hf_speculate.config import MAX_ASSISTANT_TOKENS
from hf_speculate.schedule import (
    AdaptiveSchedule,
    ConstantSchedule,
    DraftPrior,
    HeuristicSchedule,
    HistoryStore,
    RoundOutcome,
    ScheduleHistory,
)
from hf_speculate.schedule.acceptance import AcceptanceModel
from hf_speculate.schedule.costs import CostModel
from hf_speculate.schedule.work import RemainingWork
from tests.schedule.simulator import NUM_TOKENS, Machine, Trace, cliff, run, trace

MAX_DRAFT_TOKENS = 10
NUM_TRACES = 8  # enough that the best constant is best by more than one trace's luck
SHORT = 64  # tokens of a call that has others before it
TRACES = {
    "perfect": lambda place: 1.0,
    "high": lambda place: 0.9,
    "good": lambda place: 0.8,
    "fair": lambda place: 0.6,
    "low": lambda place: 0.35,
    "zero": lambda place: 0.0,
    "collapsing": lambda place: 0.92 if place < 0.5 else 0.03,
}
MACHINES = {"usual draft": Machine(), "float32 cliff": Machine(forward_s=cliff), "noisy": Machine(jitter=0.08)}
# Of the rate of the best K in 0..10, chosen in hindsight: a call of 256 tokens pays for its measurements.
FLOOR, CLIFF_FLOOR, PLAIN_FLOOR = 0.955, 0.92, 0.975
SHORT_FLOOR = 0.92  # what short calls that know nothing of each other reach is 0.84
RECORDED = Path(__file__).with_name("recorded.json")
RECORDED_FLOORS = {1: 0.95, 8: 0.88}  # by rows; where two batches end is luck, which hindsight picks the best of
DRAFT = Identity()  # histories are kept by identity


@cache
def traces(name: str, num_rows: int = 1) -> list[list[Trace]]:
    return [[trace(TRACES[name], 100 * seed + row + 1) for row in range(num_rows)] for seed in range(NUM_TRACES)]


def adaptive(history: ScheduleHistory | None = None, num_rows: int = 1, ratio: float = 0.1) -> AdaptiveSchedule:
    return AdaptiveSchedule(MAX_DRAFT_TOKENS, DraftPrior(ratio), history, num_rows)


def history_of(store: HistoryStore, call_type: object = "short", draft: object = DRAFT) -> ScheduleHistory:
    return ScheduleHistory(store, draft, call_type)


def rate(calls: list[list[Trace]], machine: Machine, make: Callable = adaptive, num_tokens: int = NUM_TOKENS) -> float:
    """Tokens per second of calls that follow each other."""
    runs = [run(make(), rows, machine, num_tokens, seed) for seed, rows in enumerate(calls)]
    return sum(schedule_run.num_tokens for schedule_run in runs) / sum(schedule_run.seconds for schedule_run in runs)


def known_rate(calls: list[list[Trace]], machine: Machine, num_rows: int) -> float:
    """Tokens per second of short calls that follow a first one."""
    store = HistoryStore()
    make = lambda: adaptive(history_of(store), num_rows)  # noqa: E731
    run(make(), calls[0], machine, SHORT)
    return rate(calls, machine, make, SHORT)


def constant_rates(calls: list[list[Trace]], machine: Machine, num_tokens: int = NUM_TOKENS) -> list[float]:
    """Tokens per second of K = 0, 1, ..."""
    makes = [lambda num=num: ConstantSchedule(num) for num in range(MAX_DRAFT_TOKENS + 1)]
    return [rate(calls, machine, make, num_tokens) for make in makes]


def assert_near_the_best(calls: list[list[Trace]], machine: str, floor: float) -> None:
    """Of the constant numbers, which are chosen in hindsight."""
    ours, constant = rate(calls, MACHINES[machine]), constant_rates(calls, MACHINES[machine])
    assert ours >= PLAIN_FLOOR * constant[0]
    assert ours >= floor * max(constant)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", ["high", "low", "zero", "collapsing"])
def test_it_comes_near_the_best_constant_and_never_far_below_plain(name, machine):
    assert_near_the_best(traces(name), machine, CLIFF_FLOOR if machine == "float32 cliff" else FLOOR)
    if name in ("high", "collapsing") and machine != "noisy":
        assert_near_the_best(traces(name, 4), machine, CLIFF_FLOOR)  # rows leave


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("num_rows", [1, 8])
def test_it_comes_near_the_best_constant_on_recorded_text(machine, num_rows):
    rows = [[guess == "1" for guess in row] for row in json.loads(RECORDED.read_text())["rows"]]
    batches = [rows[start : start + num_rows] for start in range(0, len(rows), num_rows)]
    assert_near_the_best(batches, machine, RECORDED_FLOORS[num_rows])


@pytest.mark.parametrize(("step_s", "read_s"), [(0.03, 0.01), (0.7, 0.01), (0.1, 0.05)])
def test_a_useless_draft_costs_less_than_three_and_a_half_percent(step_s, read_s):
    """Also if a probe must first read many tokens: probes are then rarer."""
    calls, machine = traces("zero"), Machine(step_s=step_s, prompt_s=step_s, read_s=read_s)
    plain = rate(calls, machine, lambda: ConstantSchedule(0))
    assert rate(calls, machine, lambda: adaptive(ratio=step_s)) >= 0.965 * plain


def test_drafting_is_tried_at_once_and_a_plain_step_soon_but_never_a_draft_as_large_as_the_target():
    lens = run(adaptive(), traces("good")[0], Machine()).draft_lens
    assert lens[0] == 5
    assert 0 in lens[1:4]
    assert set(run(adaptive(ratio=1.0), traces("perfect")[0], Machine()).draft_lens) == {0}


def test_a_draft_exceeds_the_last_one_by_two_tokens_at_most():
    lens = [num for num in run(adaptive(), traces("perfect")[0], Machine()).draft_lens if num]
    assert max(after - before for before, after in pairwise(lens)) == 2


@pytest.mark.parametrize(("ratio", "prompt_len", "is_tried"), [(0.1, 8192, True), (0.5, 8192, False), (0.5, 380, True)])
def test_a_draft_that_does_not_pay_for_a_prompt_long_for_its_text_is_never_asked(ratio, prompt_len, is_tried):
    # the prompt takes as long as 100 plain steps
    machine = Machine(0.001, lambda num_query: 0.01 + 5e-5 * num_query, 2e-4, prompt_s=ratio)
    machine = machine._replace(prefill_s=1.0, prompt_len=prompt_len)
    lens = run(adaptive(ratio=ratio), traces("perfect")[0], machine, 48).draft_lens
    assert (lens[0] > 0) is (prompt_len < 8 * 48)
    assert (max(lens) > 0) is is_tried


def test_a_useless_draft_leaves_plain_steps_and_rarer_and_rarer_probes_of_one_token():
    drafted = run(adaptive(), traces("zero")[0], Machine())
    lens, probes = drafted.draft_lens, drafted.probes
    assert probes == [number for number, num in enumerate(lens) if num and number >= probes[0]]
    waits = [after - before for before, after in pairwise(probes)]
    assert {lens[number] for number in probes} == {1}
    assert waits == sorted(waits)
    assert waits[-1] > waits[0]


def test_one_slow_first_call_of_every_size_does_not_decide():
    history, calls = history_of(HistoryStore()), traces("high")
    lens = run(adaptive(history), calls[0], Machine(first_call_factor=500)).draft_lens
    assert sum(num >= 5 for num in lens[-10:-1]) >= 8
    lens = run(adaptive(history), calls[1], Machine()).draft_lens
    assert sum(num >= 5 for num in lens[:-1]) >= 0.8 * len(lens)


def test_a_row_that_is_often_rejected_does_not_lower_the_estimates_of_others():
    model = AcceptanceModel(MAX_DRAFT_TOKENS)
    for _ in range(20):
        model.observe([0, 1], [5, 0], 5)
    good, bad = model.expected_tokens([0, 1])
    assert bad[5] < good[5]


@pytest.mark.parametrize("accepted", [0, 1])
def test_it_stays_within_its_bounds_with_a_clock_that_stands_still(accepted):
    schedule = AdaptiveSchedule(2, DraftPrior(0.1))
    for _ in range(100):
        num = schedule.num_draft_tokens
        assert 0 <= num <= 2
        schedule.update(RoundOutcome([0, 1], [num, num], [num * accepted, 0], num, 2))
    schedule.update(RoundOutcome([], [], [], 5, 2))  # no row is live


def test_a_step_that_was_measured_long_ago_still_counts():
    model = CostModel(DraftPrior(0.1))
    model.observe(RoundOutcome([0], [2], [2], 2, 1, num_fed=1, draft_s=0.4, score_s=1.0))
    for _ in range(2_000):  # suffix matches were drafted, which the draft model read before its own drafts
        model.observe(RoundOutcome([0], [2], [2], 2, 1, num_fed=5, draft_s=3.0, score_s=1.0))
    assert model.rounds_s(1, 2) == pytest.approx([1.0, 1.2, 1.4])


def test_a_step_takes_what_it_took_in_drafts_of_that_length():
    model = CostModel(DraftPrior(0.1))
    for num, draft_s in ((1, 0.3), (8, 0.8)) * 20:
        model.observe(RoundOutcome([0], [num], [num], num, 1, num_fed=1, draft_s=draft_s, score_s=1.0))
    assert model.rounds_s(1, 8)[1::7] == pytest.approx([1.3, 1.8], rel=0.02)


def test_a_call_takes_as_long_as_its_slowest_row():
    work = RemainingWork([[1.0, 2.0], [1.0, 1.0]], [10, 10])  # 10 rounds of both, or 5 of one
    assert work.rates([1.0, 1.5]) == pytest.approx([2.0, 20 / 15])
    assert work.rates([1.0, 1.5], alone_share=0.5) == pytest.approx([2.0, 20 / (7.5 * 1.5)])


def test_one_round_in_which_the_process_paused_does_not_decide():
    model = CostModel(DraftPrior(0.1))
    for num, score_s in ((5, 1.0), (2, 100.0), (5, 100.0)):  # of a new kind, and of one that is known
        model.observe(RoundOutcome([0], [num], [num], num, 1, num_fed=1, draft_s=0.1 * num, score_s=score_s))
    assert max(model.rounds_s(1, 5)) < 4


class SlowOnce:
    """Forwards over five tokens, of which the first one takes three times as long."""

    def __init__(self):
        self.num_left = 1

    def __call__(self, num_query):
        is_slow = num_query == 5 and self.num_left > 0
        self.num_left -= is_slow
        return 3.0 if is_slow else 1 + 0.02 * num_query


def test_a_length_whose_only_round_was_slow_by_chance_is_tried_again():
    # the first call drafts five tokens at once, of which the row's end leaves four; then one token seems best
    history, machine = history_of(HistoryStore()), Machine(step_s=0.01, forward_s=SlowOnce(), prompt_s=0.0)
    rows = [trace(lambda _: 0.95, seed=3)]
    model = CostModel(DraftPrior(0.01))
    for num, score_s in ((0, 1.0), (0, 1.0), (4, 3.0), *[(1, 1.02)] * 20):
        model.observe(RoundOutcome([0], [num], [num], num, 1, num_fed=1, draft_s=0.01 * num, score_s=score_s))
    assert not model.is_settled(1, 4)
    assert model.best_case_s(1, 5)[4] < 1.2
    runs = [run(adaptive(history, ratio=0.01), rows, machine, 128) for _ in range(2)]
    assert runs[-1].seconds < 0.5 * 128 * machine.plain_s(1)


def test_a_round_that_a_busy_machine_held_up_ends_no_call_after_one_that_gained():
    history, machine = (
        history_of(HistoryStore()),
        Machine(step_s=0.0, forward_s=lambda num_query: 1 + 0.002 * num_query),
    )
    for rows in traces("good")[:2]:
        run(adaptive(history, ratio=0.0), rows, machine, SHORT)
    schedule = adaptive(history, ratio=0.0)
    schedule.begin(machine.prefill_s, machine.prompt_len, machine.prompt_len, SHORT)
    num = schedule.num_draft_tokens
    schedule.update(RoundOutcome([0], [num], [0], num, 1, [SHORT], 1, 0.0, 2.5))
    assert schedule.num_draft_tokens > 0


def test_a_slow_first_round_makes_no_estimate_negative():
    model = CostModel(DraftPrior(0.1))
    for num, score_s in ((5, 0.128), (2, 0.0072), *[(1, 0.006)] * 12):
        model.observe(RoundOutcome([0], [num], [num], num, 4, num_fed=1, draft_s=0.001 * num, score_s=score_s))
    assert min(model.rounds_s(4, 5)) > 0.001
    assert min(model.best_case_s(4, 5)) > 0.0


def test_two_rejections_do_not_stop_what_paid_in_the_two_calls_before():
    history, machine = history_of(HistoryStore()), Machine(step_s=0.3)
    for rows in traces("good")[:2]:
        run(adaptive(history, ratio=0.3), rows, machine, SHORT)
    schedule = adaptive(history, ratio=0.3)
    schedule.begin(machine.prefill_s, machine.prompt_len, machine.prompt_len, SHORT)
    for _ in range(2):
        num = schedule.num_draft_tokens
        assert num > 0
        schedule.update(RoundOutcome([0], [num], [0], num, 1, [SHORT], 1, 0.3 * num, machine.forward_s(num + 1)))
    assert schedule.num_draft_tokens > 0


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("name", ["high", "good", "zero"])
def test_short_calls_come_near_the_best_constant_by_what_earlier_ones_learnt(name, num_rows, machine):
    calls = traces(name, num_rows)
    known, constant = known_rate(calls, machine, num_rows), constant_rates(calls, machine, SHORT)
    assert known >= (PLAIN_FLOOR - 0.015) * constant[0]  # a quarter of a long call, with as many first tries
    if name == "good":  # the control: without history the same calls are slower, by far if sizes differ much in cost
        least = 1.05 if machine.forward_s is cliff else 1.0
        assert known > least * rate(calls, machine, num_tokens=SHORT)
    else:
        assert known >= SHORT_FLOOR * max(constant)


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_texts_that_take_turns_lose_nothing_by_each_other(machine, num_rows):
    calls = [rows for pair in zip(traces("high", num_rows), traces("zero", num_rows), strict=True) for rows in pair]
    assert known_rate(calls, machine, num_rows) >= 0.99 * rate(calls, machine, num_tokens=SHORT)


@pytest.mark.parametrize(
    ("name", "lens", "num_useless", "has_gained"),
    [
        ("zero", [64], 1, False),
        ("zero", [4], 0, False),  # it ends before its draft was asked again, and cannot tell
        ("zero", [64, 4], 1, False),
        ("zero", [64, 64, 64], 2, False),  # the third rests
        ("high", [64], 0, True),
        ("high", [64, 4], 0, True),
    ],
)
def test_a_record_holds_whether_calls_gained_and_how_many_did_not(name, lens, num_useless, has_gained):
    history = history_of(HistoryStore())
    for num_tokens in lens:
        run(adaptive(history), traces(name)[0], Machine(), num_tokens)
    record = history.recall().records[1]
    assert (record.num_useless, record.has_gained) == (num_useless, has_gained)
    assert (record.gained_s > 0) is has_gained


def test_after_two_useless_calls_one_in_four_tries_again_then_one_in_16_and_one_in_64():
    history, tries = history_of(HistoryStore()), []
    for number in range(200):
        lens = run(adaptive(history), traces("zero")[0], Machine(prompt_s=0.1), SHORT).draft_lens
        tries += [number] if any(lens) else []
    assert tries[:2] == [0, 1]
    waits = [after - before for before, after in pairwise(tries[1:])]
    assert waits == [4, 16, 64, 64]


def test_what_is_useless_for_many_rows_may_gain_for_one():
    history = history_of(HistoryStore())
    for _ in range(3):
        run(adaptive(history, 8), traces("zero", 8)[0], Machine(), SHORT)
    lens = run(adaptive(history, 1), traces("high")[0], Machine(), SHORT).draft_lens
    assert sum(num > 0 for num in lens) > len(lens) / 2


@pytest.mark.parametrize("name", ["high", "fair"])
@pytest.mark.parametrize("machine", [Machine(), Machine(jitter=0.08)])
def test_a_text_that_is_guessed_from_its_start_gains_as_much_after_one_that_was_not(machine, name):
    seconds = [0.0, 0.0]
    for num_before in (0, 1):
        for rows in traces(name):
            history = history_of(HistoryStore())
            for before in traces("zero")[:num_before]:
                run(adaptive(history), before, machine)
            seconds[num_before] += run(adaptive(history), rows, machine).seconds
    assert seconds[0] >= 0.95 * seconds[1]


def test_a_useless_draft_is_tried_less_in_the_next_call_and_a_plain_step_is_measured_again_once_in_a_while():
    history = history_of(HistoryStore())
    first, second = (run(adaptive(history), rows, Machine()).draft_lens for rows in traces("zero")[:2])
    assert sum(num > 0 for num in second) <= 0.8 * sum(num > 0 for num in first)
    history = history_of(HistoryStore())
    lens = [run(adaptive(history), traces("high")[0], Machine(), SHORT).draft_lens[:-1] for _ in range(40)]
    assert lens[0].count(0) >= 1  # the last one's room may be 0
    assert 1 <= sum(run_lens.count(0) for run_lens in lens[1:]) <= 12


def test_kinds_and_drafts_are_kept_apart_and_go_with_the_draft():
    store, draft = HistoryStore(), Identity()
    run(adaptive(history_of(store, "a", draft)), traces("high")[0], Machine(), SHORT)
    assert history_of(store, "a", draft).recall() is not None
    for history in (history_of(store, "b", draft), history_of(store, "a"), history_of(store, "a", None)):
        assert history.recall() is None
    weak = weakref.ref(draft)
    del draft, history
    gc.collect()
    assert weak() is None


def test_the_store_is_bounded_and_its_entries_never_change():
    store = HistoryStore()
    for call_type in range(100):
        run(adaptive(history_of(store, call_type)), traces("high")[0], Machine(), SHORT)
    assert [call_type for call_type in range(100) if store.get(DRAFT, call_type)] == list(range(36, 100))
    costs_of = lambda: store.get(DRAFT, 99).costs.rounds_s(1, 4)  # noqa: E731
    before, unfinished = costs_of(), adaptive(history_of(store, 99))
    for num_left in (9, 9, 9, 0):
        assert costs_of() == before
        num = unfinished.num_draft_tokens
        unfinished.update(RoundOutcome([0], [num], [0], num, 1, [num_left], 1, 0.01 * num, 50.0))
    assert costs_of() != before


def outcome(num_drafted, num_accepted) -> RoundOutcome:
    """A round of rows 0, 1, ... that took no time."""
    return RoundOutcome(range(len(num_drafted)), num_drafted, num_accepted, max(num_drafted), 2)


def test_a_constant_schedule_never_moves():
    schedule = ConstantSchedule(5)
    schedule.begin(1.0, 100, 100, 2)
    for accepted in (0, 3, 5):
        schedule.update(outcome([5], [accepted]))
        assert schedule.num_draft_tokens == 5


@pytest.mark.parametrize(
    ("num_drafted", "num_accepted", "num_next"),
    [
        ([5], [5], 7),
        ([5], [4], 4),
        ([2], [2], 7),  # a draft that ended early and was accepted
        ([5, 5], [5, 0], 7),  # half of the rows
        ([5, 5, 5], [5, 0, 4], 4),  # fewer than half
    ],
)
def test_the_heuristic_adds_two_after_an_accepted_draft_and_removes_one_otherwise(num_drafted, num_accepted, num_next):
    schedule = HeuristicSchedule(5)
    schedule.update(outcome(num_drafted, num_accepted))
    assert schedule.num_draft_tokens == num_next


@pytest.mark.parametrize(("accepted", "bound"), [(0, 1), (1, MAX_ASSISTANT_TOKENS)])
def test_the_heuristic_stays_within_its_bounds(accepted, bound):
    schedule = HeuristicSchedule(5)
    for _ in range(MAX_ASSISTANT_TOKENS):
        num = schedule.num_draft_tokens
        schedule.update(outcome([num], [num * accepted]))
    assert schedule.num_draft_tokens == bound
