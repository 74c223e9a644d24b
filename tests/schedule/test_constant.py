"""Test the schedules that transformers offers."""

import pytest

from hf_speculate.config import MAX_ASSISTANT_TOKENS
from hf_speculate.schedule import (
    ConstantSchedule,
    HeuristicSchedule,
    RoundOutcome,
    RowAhead,
    RowOutcome,
)

AHEAD = [RowAhead(0, 100)]


def outcome(num_drafted: list[int], num_accepted: list[int]) -> RoundOutcome:
    """Return the outcome of a round that took no time."""
    pairs = enumerate(zip(num_drafted, num_accepted, strict=True))
    rows = [RowOutcome(row, drafted, accepted, accepted + 1) for row, (drafted, accepted) in pairs]
    return RoundOutcome(rows, len(rows), max(num_drafted))


def test_constant_never_moves():
    schedule = ConstantSchedule(5)
    schedule.begin(1.0, 100)
    for accepted in (0, 3, 5):
        schedule.update(outcome([5], [accepted]))
        assert schedule.choose(AHEAD, 1, 10).num_draft_tokens == 5


def test_constant_fits_the_room():
    choice = ConstantSchedule(5).choose(AHEAD, 1, 2)
    assert (choice.num_draft_tokens, choice.num_model_tokens) == (2, 2)
    assert ConstantSchedule(5).choose(AHEAD, 1, 0).num_draft_tokens == 0


def test_constant_of_free_proposals_asks_no_model():
    assert ConstantSchedule(5, 0).choose(AHEAD, 1, 10).num_model_tokens == 0


@pytest.mark.parametrize(
    ("num_drafted", "num_accepted", "num_next"),
    [
        ([5], [5], 7),
        ([5], [4], 4),
        ([2], [2], 7),  # accepted draft that ended early
        ([5, 5], [5, 0], 7),  # half of the rows
        ([5, 5, 5], [5, 0, 4], 4),  # fewer than half
    ],
)
def test_heuristic_adds_two_after_an_accepted_draft(num_drafted, num_accepted, num_next):
    schedule = HeuristicSchedule(5)
    schedule.update(outcome(num_drafted, num_accepted))
    assert schedule.choose(AHEAD, 1, 50).num_draft_tokens == num_next


@pytest.mark.parametrize(("accepted", "bound"), [(0, 1), (1, MAX_ASSISTANT_TOKENS)])
def test_heuristic_stays_within_its_bounds(accepted, bound):
    schedule = HeuristicSchedule(5)
    for _ in range(MAX_ASSISTANT_TOKENS):
        num = schedule.choose(AHEAD, 1, MAX_ASSISTANT_TOKENS).num_draft_tokens
        schedule.update(outcome([num], [num * accepted]))
    assert schedule.choose(AHEAD, 1, MAX_ASSISTANT_TOKENS).num_draft_tokens == bound
