"""Schedules say how many tokens to draft, from the rounds that they were told of."""

import pytest

from hf_speculate.config import MAX_ASSISTANT_TOKENS
from hf_speculate.schedule import ConstantSchedule, HeuristicSchedule, RoundOutcome, Schedule


def outcome(num_drafted, num_accepted) -> RoundOutcome:
    """A round of rows 0, 1, ... that took no time."""
    return RoundOutcome(range(len(num_drafted)), num_drafted, num_accepted, max(num_drafted, default=0), 2)


class ScheduleContract:
    """What every implementation keeps; a subclass makes one that starts from a number."""

    def make(self, num_draft_tokens: int) -> Schedule:
        raise AssertionError("a subclass makes the schedule")

    @pytest.mark.parametrize("num", [1, 5, MAX_ASSISTANT_TOKENS])
    def test_it_starts_from_its_number(self, num):
        assert self.make(num).num_draft_tokens == num

    @pytest.mark.parametrize("accepted", [0, 1])
    def test_it_stays_within_bounds_whatever_happens(self, accepted):
        schedule = self.make(5)
        for _ in range(2 * MAX_ASSISTANT_TOKENS):
            num = schedule.num_draft_tokens
            assert 1 <= num <= MAX_ASSISTANT_TOKENS
            schedule.update(outcome([num, num], [num * accepted, num * accepted]))

    def test_a_round_without_live_rows_is_taken(self):
        schedule = self.make(5)
        schedule.update(outcome([], []))
        assert schedule.num_draft_tokens >= 1


class TestConstantSchedule(ScheduleContract):
    def make(self, num_draft_tokens):
        return ConstantSchedule(num_draft_tokens)

    @pytest.mark.parametrize("accepted", [0, 3, 5])
    def test_it_never_moves(self, accepted):
        schedule = self.make(5)
        for _ in range(10):
            schedule.update(outcome([5], [accepted]))
        assert schedule.num_draft_tokens == 5


class TestHeuristicSchedule(ScheduleContract):
    def make(self, num_draft_tokens):
        return HeuristicSchedule(num_draft_tokens)

    @pytest.mark.parametrize(
        ("num_drafted", "num_accepted", "num_next"),
        [
            ([5], [5], 7),
            ([5], [4], 4),
            ([5], [0], 4),
            ([2], [2], 7),  # a draft that ended early and stayed whole
            ([5, 5], [5, 0], 7),  # half of the rows
            ([5, 5, 5], [5, 0, 4], 4),  # fewer than half
            ([5, 3, 5], [5, 3, 4], 7),
        ],
    )
    def test_two_more_after_a_whole_draft_one_less_after_a_refusal(self, num_drafted, num_accepted, num_next):
        schedule = self.make(5)
        schedule.update(outcome(num_drafted, num_accepted))
        assert schedule.num_draft_tokens == num_next

    def test_it_follows_every_round(self):
        schedule, seen = self.make(1), []
        for accepts in (True, True, False, False, True, False, False, False, False, False):
            num = schedule.num_draft_tokens
            schedule.update(outcome([num], [num if accepts else 0]))
            seen.append(schedule.num_draft_tokens)
        assert seen == [3, 5, 4, 3, 5, 4, 3, 2, 1, 1]
