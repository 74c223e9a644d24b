"""Test the adaptive schedule's estimates of round times and draft acceptance."""

import pytest

from hf_speculate.schedule import DraftPrior
from hf_speculate.schedule.acceptance import Acceptance, DraftedRow
from hf_speculate.schedule.costs import Costs

MAX_DRAFT_TOKENS = 10


def costs_of(
    *seconds: tuple[int, float], num_rows: int = 1, sizes: tuple[int, ...] | None = None
) -> Costs:
    """Return the costs after verifications with the given K and seconds."""
    costs = Costs(DraftPrior(0.2), MAX_DRAFT_TOKENS, sizes)
    for num, score_s in seconds:
        costs.add_verification(num_rows, num, score_s)
    return costs


def test_plain_step_is_a_median():
    costs = costs_of((0, 1.0), (0, 1.1), (0, 1.05), (0, 1.9), (0, 1.0))
    assert costs.plain_s(1) == pytest.approx(1.05, rel=0.03)


@pytest.mark.parametrize("num", [0, 3])
def test_pause_counts_as_twice_the_expected_seconds(num):
    costs = costs_of((0, 1.0), (0, 1.0), (num, 30.0))
    assert costs.verifications_s(1)[num] < 2.2
    for _ in range(3):
        costs.add_verification(1, num, 1.0)
    assert costs.verifications_s(1)[num] == pytest.approx(1.0, rel=0.1)


def test_first_slow_plain_step_gives_way_to_the_second():
    assert costs_of((0, 9.0), (0, 1.0)).plain_s(1) == 1.0


def test_single_plain_step_takes_no_longer_than_longer_rounds():
    assert costs_of((0, 9.0), (2, 1.2), (2, 1.2)).plain_s(1) == pytest.approx(1.2)


def test_plain_steps_are_due_first_and_after_150_drafted_rounds():
    costs = costs_of()
    assert costs.is_plain_due
    costs.add_verification(1, 0, 1.0)
    due = []
    for _ in range(150):
        due.append(costs.is_plain_due)
        costs.add_verification(1, 3, 1.1)
    assert not any(due)
    assert costs.is_plain_due
    costs.add_verification(1, 0, 1.0)
    assert not costs.is_plain_due


def test_plain_steps_after_a_long_time_replace_earlier_ones():
    costs = costs_of(*[(0, 1.0)] * 15, *[(3, 0.6)] * 150, (0, 0.5), (0, 0.5))
    assert costs.plain_s(1) == 0.5


def test_verifications_lie_on_a_line_between_measured_lengths():
    costs = costs_of(*[(0, 1.0)] * 5, *[(2, 1.4)] * 15, *[(8, 2.6)] * 15)
    seconds = costs.verifications_s(1)
    assert seconds[5] == pytest.approx(2.0, rel=0.1)
    assert seconds == sorted(seconds)


def test_rows_between_measured_numbers_are_interpolated():
    costs = costs_of((0, 1.0), (0, 1.0))
    for _ in range(2):
        costs.add_verification(5, 0, 2.0)
    assert costs.plain_s(3) == pytest.approx(1.5)
    assert costs.plain_s(9) == pytest.approx(2.0)


def test_compiled_lengths_run_as_the_next_size():
    costs = costs_of(sizes=(2, 4, 8))
    assert [costs.size_of(num) for num in (0, 1, 2, 3, 8, 9)] == [0, 2, 2, 4, 8, 8]
    costs.add_verification(1, 3, 1.0)
    assert costs.is_measured(1, 4)
    assert not costs.is_measured(1, 2)
    assert not costs.is_measured(2, 4)


def test_plain_steps_are_due_until_a_compiled_one_was_measured():
    costs = costs_of((0, 50.0), sizes=(2, 4, 8))
    assert costs.is_plain_due
    costs.add_verification(1, 0, 1.0)
    assert not costs.is_plain_due
    assert costs.start_s == pytest.approx(49.0)


def test_first_forward_of_a_compiled_size_is_not_measured():
    costs = costs_of((0, 50.0), (0, 1.0), (0, 1.0), sizes=(2, 4, 8))
    before = costs.verifications_s(1)[4]
    costs.add_verification(1, 4, 50.0)
    assert costs.verifications_s(1)[4] == pytest.approx(before, rel=0.05)


def test_prompt_of_many_rows_is_read_as_fast_as_the_target_did():
    costs = costs_of((0, 1.0))
    costs.begin(4.0, 100)
    assert costs.read_s(8, 100) == pytest.approx(0.2 * 4.0)


def test_measured_reading_replaces_the_prior():
    costs = costs_of((0, 1.0))
    costs.begin(4.0, 100)
    costs.add_draft(1, 2, 1, 0.4)
    costs.add_draft(1, 2, 100, 1.4)
    assert costs.read_s(1, 100) == pytest.approx(1.0)
    assert costs.read_s(1, 1) == 0.0


def test_compiling_in_the_first_read_counts_as_twice():
    costs = costs_of((0, 1.0))
    costs.begin(4.0, 100)
    costs.add_draft(1, 2, 100, 90.0)
    assert costs.read_s(1, 100) == pytest.approx(2 * 0.2 * 4.0)


def test_draft_steps_are_medians_by_rows():
    costs = costs_of((0, 1.0))
    assert costs.drafts_s(1)[5] == pytest.approx(1.0)
    for seconds in (0.5, 0.5, 9.0):
        costs.add_draft(1, 5, 1, seconds)
    assert costs.drafts_s(1)[5] == pytest.approx(0.5)


def test_pause_in_the_first_draft_of_fewer_rows_counts_as_twice():
    costs = costs_of((0, 1.0))
    costs.add_draft(2, 1, 1, 0.3)
    costs.add_draft(1, 1, 1, 30.0)
    assert costs.step_s(1) == pytest.approx(0.6)


def test_parallel_draft_takes_one_step():
    costs = Costs(DraftPrior(0.2, is_parallel=True), MAX_DRAFT_TOKENS)
    costs.add_verification(1, 0, 1.0)
    assert costs.drafts_s(1)[:3] == pytest.approx([0.0, 0.2, 0.2])


def test_quantised_target_is_expected_to_verify_slowly():
    slopes = []
    for is_known in (True, False):
        costs = Costs(DraftPrior(0.2, is_verification_known=is_known), MAX_DRAFT_TOKENS)
        costs.add_verification(1, 0, 1.0)
        slopes.append(costs.verifications_s(1)[5])
    assert slopes[1] > slopes[0] + 1


def test_acceptance_follows_the_newest_rounds():
    acceptance = Acceptance(MAX_DRAFT_TOKENS)
    for num_accepted in [5] * 60 + [0] * 60:
        acceptance.observe([DraftedRow(num_accepted, 5)])
    assert acceptance.probabilities()[0] < 0.25
    for _ in range(60):
        acceptance.observe([DraftedRow(5, 5)])
    assert acceptance.probabilities()[0] > 0.85


def test_positions_never_reached_are_as_good_as_the_one_before():
    acceptance = Acceptance(MAX_DRAFT_TOKENS)
    for _ in range(100):
        acceptance.observe([DraftedRow(2, 2)])
    probabilities = acceptance.probabilities()
    assert probabilities[9] > 0.8 * probabilities[1]


def test_source_that_stops_early_counts_as_rejected_there():
    early, full = Acceptance(MAX_DRAFT_TOKENS), Acceptance(MAX_DRAFT_TOKENS)
    for _ in range(50):
        early.observe([DraftedRow(2, 5)])
        full.observe([DraftedRow(2, 2)])
    assert early.probabilities()[2] < 0.3 < 0.7 < full.probabilities()[2]


def test_optimism_fades_with_observations():
    acceptance = Acceptance(MAX_DRAFT_TOKENS)
    bonuses = []
    for _ in range(2):
        bonuses.append(
            acceptance.probabilities(is_optimistic=True)[0] - acceptance.probabilities()[0]
        )
        for _ in range(50):
            acceptance.observe([DraftedRow(0, 1)])
    assert 0 < bonuses[1] < bonuses[0]


def test_slow_draft_never_pays_unless_one_step_drafts_all():
    assert DraftPrior(1.2).never_pays
    assert not DraftPrior(0.9).never_pays
    assert not DraftPrior(1.2, is_parallel=True).never_pays
    assert not DraftPrior(1.2, is_verification_known=False).never_pays
