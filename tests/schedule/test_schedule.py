"""Constant and heuristic schedules."""

import pytest

from hf_speculate.config import MAX_ASSISTANT_TOKENS
from hf_speculate.schedule import ConstantSchedule, HeuristicSchedule, RoundOutcome


def outcome(num_drafted, num_accepted) -> RoundOutcome:
    """A round of rows 0, 1, ... that took no time."""
    return RoundOutcome(range(len(num_drafted)), num_drafted, num_accepted, max(num_drafted), 2)


def test_a_constant_schedule_never_moves():
    schedule = ConstantSchedule(5)
    schedule.begin(1.0, 100, 2)
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
