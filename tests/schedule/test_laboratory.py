"""Test the adaptive schedule on recorded texts.

The margins are wide. The complete laboratory is run by hand.
"""

import pytest

from tests.schedule.laboratory.cells import Cell, main_cells, measure, read_traces, scenes
from tests.schedule.laboratory.table import ours
from tests.schedule.laboratory.texts import Match, num_equal, rival_matches, runs_of, suffix_matches

TRACES = read_traces()
CELLS = {cell.name: cell for cell in [*main_cells(TRACES, 64), *scenes(TRACES)]}
# Minimum speed relative to the best constant. The worst of many runs is 0.04 above it.
FLOORS = {
    "lookup: texts, smollm2-cpu, B=1, N=64": 1.0,
    "lookup: copying, h200, B=1, N=64": 0.95,
    "lookup: copying, smollm2-cpu, B=8, N=64": 0.9,
    "lookup: texts, h200, B=8, N=64": 0.92,
    "lookup: misleading, compiled-cpu, B=8, N=64": 0.93,
    "model: pair, pair-cpu, B=1, N=64": 0.92,
    "model: pair, h200, B=8, N=64": 0.92,
    "model: a=0.8, ideal, B=8, N=64": 0.9,
    "model: switch, ideal, B=1, N=64": 0.88,
    "model: a=0.0, pair-cpu, B=1, N=64": 0.94,
    "model: a=0.1, h200, B=8, N=64": 0.93,
    "model: a=0.9, useless, B=1, N=64": 0.93,
    "head: head, head-cpu, B=1, N=64": 0.93,
    "hybrid: good model, pair-cpu, B=1, N=64": 0.95,
    "hybrid: useless model, h200, B=1, N=64": 0.93,
    "lock step: a=0.9, compiled-cpu, B=2, N=64": 0.92,
    "refill: pair, pair-cpu, B=2, N=96": 0.91,
    "refill: a=0.0, pair-cpu, B=8, N=96": 0.95,
    "compiled: a=0.8, 10 times, compiled-cpu, B=1, N=64": 0.93,
    "compiled: a=0.8, 100 times, compiled-cpu, B=1, N=64": 0.85,
    "long prompt: a=0.8, ideal, 30 s, B=1, N=256": 0.92,
    "unsteady: half as fast, a=0.8, ideal, B=1, N=128": 0.92,
    "unsteady: growing context, a=0.8, ideal, B=8, N=128": 0.92,
    "offload: pair, offload K<=32, B=1, N=128": 0.92,
}


@pytest.mark.parametrize("name", FLOORS)
def test_schedule_comes_near_the_best_constant(name):
    row = measure(CELLS[name], "5%+pauses", [0])
    assert ours(row) >= FLOORS[name] * row["best"]


def test_tasks_in_turn_gain_more_than_any_constant():
    cell: Cell = next(cell for cell in CELLS.values() if cell.group == "tasks in turn")
    row = measure(cell, "5%+pauses", [0, 1])
    assert ours(row) >= row["best"]
    assert ours(row) >= 1.03 * row["rival"]


def test_matches_are_those_of_the_drafter():
    prompt, tokens = [1, 2, 3, 4, 1, 2], [3, 4, 9, 3, 4]
    first, *_, last = suffix_matches(prompt, tokens)
    assert first == Match(2, 32, 2)  # the repeated continuation of "1 2"
    assert last.match_len == 1
    assert [match.num_right for match in rival_matches(prompt, tokens)][:2] == [2, 1]


def test_runs_count_guesses_in_a_row():
    assert runs_of([True, True, False, True]) == [2, 1, 0, 1]
    assert num_equal([5, 6, 7], [5, 6, 8, 9]) == 2
