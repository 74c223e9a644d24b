"""Draft lengths are bounded by what rows may still emit, and a schedule learns from live rows."""

from types import SimpleNamespace

import pytest
import torch

from hf_speculate.engine.draft_length import DraftLength
from hf_speculate.types import StageSeconds
from tests.schedule.scripted import ScriptedSchedule


@pytest.mark.parametrize("is_lock_step", [False, True])
def test_no_token_is_drafted_past_the_end_of_the_last_row(is_lock_step):
    batch = SimpleNamespace(num_left=[2, 5, 9], draft_limits=[8, 8, 8], is_finished=[False, False, True])
    assert DraftLength(ScriptedSchedule([8]), 10, is_lock_step).next(batch) == 4


def test_finished_rows_are_not_learned_from():
    schedule = ScriptedSchedule([3])
    record = SimpleNamespace(
        num_round=1,
        was_live=[False, True],
        row_ids=[4, 6],
        verified=SimpleNamespace(num_drafted=[3, 2], num_accepted=[0, 1]),
        num_left=[0, 7],
        seconds=StageSeconds(*[0.0] * len(StageSeconds._fields)),
        draft=SimpleNamespace(token_ids=torch.zeros(2, 3)),
        num_draft_tokens=3,
        num_fed=1,
    )
    DraftLength(schedule, 10).on_round(record)
    (outcome,) = schedule.outcomes
    assert (outcome.row_ids, outcome.num_drafted, outcome.num_accepted, outcome.num_left) == ([6], [2], [1], [7])
    assert outcome.num_rows == 2
