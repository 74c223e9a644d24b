"""What a call learnt helps the next ones of its kind, and does them no harm."""

import gc
import weakref

import pytest

from hf_speculate.schedule import AdaptiveSchedule, ConstantSchedule, HistoryStore, RoundOutcome, ScheduleHistory
from tests.schedule.simulator import Machine, Trace, run
from tests.schedule.test_adaptive import MACHINES, MAX_DRAFT_TOKENS, PLAIN_FLOOR, traces

SHORT = 64  # tokens of a call
NUM_ROWS = [1, 8]
# Of the best constant K, which was chosen in hindsight. What calls that know nothing of each other reach is 0.84.
FLOOR = 0.92


class Draft:
    """Stands for a draft model: histories are kept by identity."""


DRAFT = Draft()


def history_of(store: HistoryStore, kind: object = "short", draft: Draft | None = DRAFT) -> ScheduleHistory:
    return ScheduleHistory(store, draft, kind)


def rate_of(calls: list[list[Trace]], machine: Machine, make) -> float:
    """Tokens per second of calls that follow each other."""
    runs = [run(make(), rows, machine, SHORT) for rows in calls]
    return sum(one.num_tokens for one in runs) / sum(one.seconds for one in runs)


def known_rate(calls: list[list[Trace]], machine: Machine, ratio: float, num_rows: int) -> float:
    """Tokens per second of calls that follow a first one."""
    target = HistoryStore()

    def make() -> AdaptiveSchedule:
        return AdaptiveSchedule(MAX_DRAFT_TOKENS, ratio, history_of(target), num_rows)

    run(make(), calls[0], machine, SHORT)
    return rate_of(calls, machine, make)


def constant_rates(calls: list[list[Trace]], machine: Machine) -> list[float]:
    """Tokens per second of K = 0, 1, ..."""
    return [rate_of(calls, machine, lambda num=num: ConstantSchedule(num)) for num in range(MAX_DRAFT_TOKENS + 1)]


def test_two_rejections_do_not_stop_what_paid_in_the_two_calls_before():
    history, machine = history_of(HistoryStore()), Machine(step_s=0.3)
    for rows in traces("good")[:2]:
        run(AdaptiveSchedule(MAX_DRAFT_TOKENS, 0.3, history), rows, machine, SHORT)
    schedule = AdaptiveSchedule(MAX_DRAFT_TOKENS, 0.3, history)
    for _ in range(2):
        num = schedule.num_draft_tokens
        assert num > 0
        schedule.update(RoundOutcome([0], [num], [0], num, 1, [SHORT], 1, 0.3 * num, machine.forward_s(num + 1)))
    assert schedule.num_draft_tokens > 0


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("name", ["high", "zero"])
def test_short_calls_come_near_the_best_constant(name, num_rows, machine):
    calls, (costs, ratio) = traces(name, num_rows), MACHINES[machine]
    known, constant = known_rate(calls, costs, ratio, num_rows), constant_rates(calls, costs)
    assert known >= FLOOR * max(constant)
    assert known >= (PLAIN_FLOOR - 0.015) * constant[0]  # a quarter of a long call, with as many first tries


@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_short_calls_gain_by_what_earlier_ones_learnt(num_rows):
    """The control: without history the same calls are slower on every machine."""
    for machine, ratio in MACHINES.values():
        calls = traces("good", num_rows)
        anew = rate_of(calls, machine, lambda ratio=ratio: AdaptiveSchedule(MAX_DRAFT_TOKENS, ratio))
        assert known_rate(calls, machine, ratio, num_rows) > 1.01 * anew


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("machine", MACHINES)
def test_texts_that_take_turns_lose_nothing_by_each_other(machine, num_rows):
    costs, ratio = MACHINES[machine]
    calls = [rows for pair in zip(traces("high", num_rows), traces("zero", num_rows), strict=True) for rows in pair]
    anew = rate_of(calls, costs, lambda: AdaptiveSchedule(MAX_DRAFT_TOKENS, ratio))
    assert known_rate(calls, costs, ratio, num_rows) >= 0.99 * anew


@pytest.mark.parametrize(
    ("name", "lens", "never_paid"),
    [("zero", [64], True), ("zero", [4], False), ("high", [4], False), ("zero", [64, 4], True), ("high", [64], False)],
)
def test_a_call_that_ends_before_its_draft_was_asked_again_tells_nothing(name, lens, never_paid):
    history = history_of(HistoryStore())
    for num_tokens in lens:
        run(AdaptiveSchedule(MAX_DRAFT_TOKENS, 0.1, history), traces(name)[0], Machine(), num_tokens)
    assert history.recall().never_paid is never_paid


@pytest.mark.parametrize("name", ["high", "fair"])
@pytest.mark.parametrize("machine", ["usual draft", "noisy"])
def test_a_text_that_is_guessed_from_its_start_gains_as_much_after_one_that_was_not(machine, name):
    (costs, ratio), seconds = MACHINES[machine], [0.0, 0.0]
    for num_before in (0, 1):
        for rows in traces(name):
            history = history_of(HistoryStore())
            for before in traces("zero")[:num_before]:
                run(AdaptiveSchedule(MAX_DRAFT_TOKENS, ratio, history), before, costs)
            seconds[num_before] += run(AdaptiveSchedule(MAX_DRAFT_TOKENS, ratio, history), rows, costs).seconds
    assert seconds[0] >= 0.95 * seconds[1]


def test_a_draft_that_was_useless_in_one_call_is_tried_less_in_the_next():
    history, num_tries = history_of(HistoryStore()), []
    for rows in traces("zero")[:2]:
        draft_lens = run(AdaptiveSchedule(MAX_DRAFT_TOKENS, 0.1, history), rows, Machine()).draft_lens
        num_tries.append(sum(num > 0 for num in draft_lens))
    assert num_tries[1] <= 0.8 * num_tries[0]


def test_a_plain_step_is_measured_again_once_in_a_while():
    target, num_plain = HistoryStore(), []
    for _ in range(40):
        schedule = AdaptiveSchedule(MAX_DRAFT_TOKENS, 0.1, history_of(target))
        lens = run(schedule, traces("high")[0], Machine(), SHORT).draft_lens[:-1]  # the last one's room may be 0
        num_plain.append(lens.count(0))
    assert num_plain[0] >= 1
    assert 1 <= sum(num_plain[1:]) <= 12


def test_kinds_and_drafts_are_kept_apart_and_go_with_the_draft():
    store, draft = HistoryStore(), Draft()
    run(AdaptiveSchedule(4, 0.1, history_of(store, "a", draft)), traces("high")[0], Machine(), SHORT)
    assert history_of(store, "a", draft).recall() is not None
    for other in (history_of(store, "b", draft), history_of(store, "a"), history_of(store, "a", None)):
        assert other.recall() is None
    weak = weakref.ref(draft)
    del draft, other
    gc.collect()
    assert weak() is None


def test_the_store_is_bounded_and_its_entries_never_change():
    store = HistoryStore()
    for kind in range(100):
        run(AdaptiveSchedule(4, 0.1, history_of(store, kind)), traces("high")[0], Machine(), SHORT)
    assert [kind for kind in range(100) if store.get(DRAFT, kind)] == list(range(36, 100))
    before, unfinished = store.get(DRAFT, 99).costs.rounds_s(1, 4), AdaptiveSchedule(4, 0.1, history_of(store, 99))
    for num_left in (9, 9, 9, 0):
        assert store.get(DRAFT, 99).costs.rounds_s(1, 4) == before
        num = unfinished.num_draft_tokens
        unfinished.update(RoundOutcome([0], [num], [0], num, 1, [num_left], 1, 0.01 * num, 50.0))
    assert store.get(DRAFT, 99).costs.rounds_s(1, 4) != before
