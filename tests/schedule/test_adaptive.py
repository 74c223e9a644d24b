"""Test the choices of the adaptive schedule, round by round."""

from itertools import pairwise

import pytest

from hf_speculate.schedule import (
    PLAIN_STEP,
    AdaptiveSchedule,
    DraftPrior,
    RoundOutcome,
    RowAhead,
    RowOutcome,
    ScheduleMemory,
)
from hf_speculate.schedule.costly import RoundCosts, best_length
from hf_speculate.schedule.free import best_width, row_worths
from tests.schedule.laboratory.machines import Machine
from tests.schedule.laboratory.replay import Process, Setting
from tests.schedule.laboratory.texts import even_texts, misleading_texts

STEADY = Machine(
    "steady", lambda n, k: 1 + 0.02 * k, lambda n, k: 0.2 * k, prompt=lambda n: 0.5, step_ratio=0.2
)


def decode(
    memory: ScheduleMemory, rate: float, num_calls: int, num_tokens: int = 64, **setting
) -> list[list[int]]:
    """Return the width of every round in each call."""
    setting = {"has_model": True, **setting}
    process = Process(Setting(STEADY, num_tokens=num_tokens, **setting))
    texts = even_texts(rate) if setting["has_model"] else misleading_texts()
    max_model = 10 if setting["has_model"] else 0
    schedules = [AdaptiveSchedule(memory, max_model) for _ in range(num_calls)]
    return [process.decode(schedule, [texts[at]]).widths for at, schedule in enumerate(schedules)]


def new_memory(ratio: float = 0.2) -> ScheduleMemory:
    return ScheduleMemory(DraftPrior(ratio))


def test_first_round_of_a_type_is_a_plain_step():
    schedule = AdaptiveSchedule(new_memory(), 10)
    schedule.begin(4.0, 64)
    assert schedule.choose([RowAhead(0, 64)], 1, 10, 65) == PLAIN_STEP


def test_good_draft_is_used_at_once_and_in_later_calls():
    first, second = decode(new_memory(), 0.9, 2)
    assert first[0] == 0
    assert all(first[1:-1])
    assert all(second[:-1])


def test_waits_between_trials_double_and_live_across_calls():
    memory = new_memory()
    memory.account = -10.0
    rounds = [width for widths in decode(memory, 0.0, 8) for width in widths]
    drafted = [at for at, width in enumerate(rounds) if width]
    waits = [after - before - 1 for before, after in pairwise(drafted) if after - before > 1]
    assert [round(wait / 8) * 8 for wait in waits] == [8, 16, 32, 64, 128]


def test_waits_stay_short_while_past_gains_pay():
    memory = new_memory()
    decode(memory, 0.9, 3)
    assert memory.account > 10
    memory.wait = 256
    useless = decode(memory, 0.0, 1)[0]
    drafted = [at for at, width in enumerate(useless) if width]
    assert max(after - before for before, after in pairwise(drafted)) <= 34


def test_draft_that_pays_again_shortens_the_wait():
    memory = new_memory()
    decode(memory, 0.0, 3)
    assert memory.wait > 4
    decode(memory, 0.95, 8)
    assert memory.wait == 4


def test_prompt_too_long_for_the_rest_of_a_call_is_not_read():
    chosen = []
    for num_left in (12, 1000):
        memory = new_memory()
        decode(memory, 0.8, 2)
        schedule = AdaptiveSchedule(memory, 10)
        schedule.begin(40.0, 4000)
        chosen.append(schedule.choose([RowAhead(0, num_left)], 1, 10, 4000).num_model_tokens)
    assert chosen[0] == 0 < chosen[1]


def test_choice_fits_the_room_that_is_left():
    memory = new_memory()
    decode(memory, 0.95, 2)
    schedule = AdaptiveSchedule(memory, 10)
    schedule.begin(4.0, 64)
    assert schedule.choose([RowAhead(0, 3)], 1, 10).num_draft_tokens <= 2
    assert schedule.choose([RowAhead(0, 50)], 1, 0) == PLAIN_STEP


def test_free_proposals_need_no_trials():
    memory = new_memory(0.0)
    widths = decode(memory, 0.0, 6, has_model=False, has_lookup=True)
    shares = [sum(width > 0 for width in of_call) / len(of_call) for of_call in widths]
    assert shares[-1] < 0.1
    assert memory.wait == 4


def test_width_grows_with_the_probability_of_the_proposal():
    memory = new_memory(0.0)
    for num, seconds in ((0, 1.0), (0, 1.0), (5, 1.5), (5, 1.5), (10, 2.0), (10, 2.0)):
        memory.costs.add_verification(1, num, seconds)
    schedule, widths = AdaptiveSchedule(memory, 0), []
    schedule.begin(4.0, 64)
    for rate in (0.05, 0.5, 0.95):
        proposed = tuple(rate**position for position in range(1, 11))
        widths.append(schedule.choose([RowAhead(0, 50, proposed)], 1, 10).num_draft_tokens)
    assert widths == sorted(widths)
    assert widths[0] == 0
    assert widths[2] == 10


def test_token_of_the_row_that_ends_last_is_worth_most():
    rows = [RowAhead(0, 100), RowAhead(1, 10)]
    late, early = row_worths(rows, {})
    assert late > 0.99
    assert early < 0.01


def test_worths_of_equal_rows_share_a_step():
    worths = row_worths([RowAhead(row, 50) for row in range(4)], {})
    assert worths == pytest.approx([0.25] * 4)


def test_best_width_ends_where_tokens_cost_more_than_they_gain():
    row = RowAhead(0, 50, (0.9, 0.8, 0.3, 0.05, 0.04))
    steep = [1 + 0.2 * num for num in range(11)]
    width, saved_s = best_width([row], [1.0], 1.0, steep, range(1, 11))
    assert width == 3
    assert saved_s == pytest.approx(0.9 + 0.8 + 0.3 - 0.6)
    assert best_width([row], [1.0], 1.0, steep, range(1, 3))[0] == 2
    assert best_width([RowAhead(0, 50)], [1.0], 1.0, steep, range(1, 11)) == (0, 0.0)


def test_best_length_weighs_drafts_and_reading():
    cheap = RoundCosts(1.0, [1 + 0.05 * num for num in range(11)], 0.0)
    probabilities = [0.8**num for num in range(1, 11)]
    num, gain = best_length(probabilities, 64, cheap, range(1, 11))
    assert num >= 5
    assert gain > 2
    with_reading = best_length(probabilities, 64, cheap._replace(read_s=30.0), range(1, 11))
    assert with_reading[1] < gain
    dear = cheap._replace(rounds_s=[1 + 0.5 * num for num in range(11)])
    assert best_length(probabilities, 64, dear, range(1, 11))[0] < num


def test_new_size_is_compiled_once_its_lack_has_cost_as_much():
    memory = ScheduleMemory(DraftPrior(0.2), sizes=(2, 4, 8))
    setting = Setting(STEADY, has_model=True, sizes=(2, 4, 8), compile_factor=50.0, keeps_rows=True)
    process, texts = Process(setting), even_texts(0.9)
    widths = [process.decode(AdaptiveSchedule(memory, 10), [text]).widths for text in texts[:6]]
    rounds = [width for of_call in widths for width in of_call]
    first = next(at for at, width in enumerate(rounds) if width)
    assert 20 < first < 250
    assert sum(width > 0 for width in rounds[first:]) > 0.8 * len(rounds[first:])


def test_sizes_of_one_compilation_are_drafted_at_once():
    memory = ScheduleMemory(DraftPrior(0.2), sizes=(2, 4, 8), compiles_sizes=False)
    setting = Setting(STEADY, has_model=True, sizes=(2, 4, 8), compile_factor=50.0, keeps_rows=True)
    widths = Process(setting).decode(AdaptiveSchedule(memory, 10), even_texts(0.9)[:1]).widths
    assert 0 < next(at for at, width in enumerate(widths) if width) < 10


def test_outcome_of_an_unusable_round_changes_no_choice_range():
    """Use a clock that does not advance."""
    memory = new_memory()
    schedule = AdaptiveSchedule(memory, 2)
    for number in range(100):
        choice = schedule.choose([RowAhead(0, 200 - number), RowAhead(1, 200 - number)], 2, 2)
        assert 0 <= choice.num_draft_tokens <= 2
        num = choice.num_draft_tokens
        rows = [RowOutcome(row, num, 0, 1) for row in range(2)]
        schedule.update(RoundOutcome(rows, 2, num, choice.num_model_tokens))


def test_round_gains_what_its_slowest_row_gains():
    accounts = []
    for others in (1, 4):  # tokens that the second row emits, of the 4 that the first does
        memory = new_memory()
        schedule = AdaptiveSchedule(memory, 10)
        rows = [RowAhead(0, 40), RowAhead(1, 40)]
        schedule.choose(rows, 2, 10)
        schedule.update(
            RoundOutcome([RowOutcome(row, 0, 0, 1) for row in (0, 1)], 2, 0, 0, score_s=1.0)
        )
        schedule.choose(rows, 2, 10)
        emitted = [RowOutcome(0, 3, 3, 4), RowOutcome(1, 3, others - 1, others)]
        before = memory.account
        schedule.update(RoundOutcome(emitted, 2, 3, 3, draft_s=0.5, score_s=1.0))
        accounts.append(memory.account - before)
    assert accounts[1] - accounts[0] == pytest.approx(3.0)
