"""Test the adaptive schedule's bound on drafting losses over all calls of a type."""

import random
from collections.abc import Callable
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from hf_speculate.schedule import (
    AdaptiveSchedule,
    Choice,
    DraftPrior,
    RoundOutcome,
    RowAhead,
    RowOutcome,
    ScheduleMemory,
)

SHARE = 0.02  # maximum loss per counted second
ALLOWANCE = 24.0  # additional loss, in plain steps
MAX_FACTOR = 2.0  # maximum cost of a round relative to the expected seconds, excluding reading
ROUNDING = 1e-6
MAX_DRAFT_TOKENS = 10

# Acceptance in a round, given its number; chosen to mislead a schedule.
ADVERSARIES: dict[str, Callable[[int], bool]] = {
    "useless": lambda number: False,
    "good, then useless": lambda number: number < 40,
    "useless, then good, then useless": lambda number: 40 <= number < 90,
    "every other": lambda number: number % 2 == 0,
    "one in seven": lambda number: number % 7 == 0,
    "always good": lambda number: True,
}


class Machine(NamedTuple):
    """Seconds of a round; a plain step takes 1."""

    slope: float = 0.1  # per verified token
    step_s: float = 0.2  # per draft step
    read_s: float = 0.01  # per prompt token
    jitter: float = 0.0
    pause_rate: float = 0.0  # fraction of rounds that take 30 times as long
    compile_s: float = 0.0  # first forward with a new length


class Ledger:
    """Bound on the losses of all calls in a process."""

    def __init__(self, memory: ScheduleMemory) -> None:
        self.memory = memory
        self.counted = self.replaced = 0.0  # plain steps

    def add(self, outcome: RoundOutcome, num_unread: int, num_steps: int) -> None:
        """Add a round before the schedule learns from it."""
        costs, num_rows = self.memory.costs, outcome.num_rows
        plain_s = costs.plain_s(num_rows)
        if plain_s is None:
            return
        expected_s, read_s = costs.verifications_s(num_rows)[outcome.num_draft_tokens], 0.0
        if outcome.num_model_tokens:
            expected_s += costs.drafts_s(num_rows)[outcome.num_model_tokens]
            read_s = costs.read_s(num_rows, num_unread)
        counted = min(outcome.seconds, MAX_FACTOR * expected_s + read_s) / plain_s
        self.counted += counted
        self.replaced += num_steps if outcome.num_draft_tokens else counted

    @property
    def excess(self) -> float:
        """Return the loss beyond the bound in plain steps; negative if within the bound."""
        return self.counted - self.replaced - SHARE * self.counted - ALLOWANCE


def play(
    machine: Machine,
    is_accepted: Callable[[int], bool],
    has_model: bool,
    is_free: bool,
    num_rows: int = 1,
    num_calls: int = 6,
    num_tokens: int = 64,
    seed: int = 0,
    step_ratio: float = 0.2,
    sizes: tuple[int, ...] | None = None,
) -> tuple[Ledger, int]:
    """Decode calls, check the bound after every round, and return the ledger and drafted rounds."""
    generator, compiled = random.Random(seed), set()
    memory = ScheduleMemory(DraftPrior(step_ratio), MAX_DRAFT_TOKENS, sizes)
    ledger, number, num_drafted = Ledger(memory), 0, 0
    for _ in range(num_calls):
        schedule = AdaptiveSchedule(memory, MAX_DRAFT_TOKENS if has_model else 0)
        schedule.begin(4.0, 64)
        num_left, num_unread = [num_tokens] * num_rows, 65
        while num_left:
            max_tokens = min(max(num_left) - 1, MAX_DRAFT_TOKENS)
            proposed = (
                [0.97**position for position in range(1, MAX_DRAFT_TOKENS + 1)] if is_free else []
            )
            ahead = [
                RowAhead(row, num, tuple(proposed[: num - 1])) for row, num in enumerate(num_left)
            ]
            choice = schedule.choose(ahead, num_rows, max_tokens, num_unread if has_model else 0)
            rows = rows_of(choice, ahead, is_accepted(number), bool(proposed))
            outcome = outcome_of(
                machine, choice, rows, num_rows, num_unread, generator, compiled, sizes
            )
            after = [num - row.num_emitted for num, row in zip(num_left, rows, strict=True)]
            ledger.add(outcome, num_unread, max(num_left) - max(after))
            schedule.update(outcome)
            assert ledger.excess <= ROUNDING
            num_left = [max(num, 1) for num in after] if any(num > 0 for num in after) else []
            num_unread = 1 if choice.num_model_tokens else num_unread + 1
            number, num_drafted = number + 1, num_drafted + (choice.num_draft_tokens > 0)
    return ledger, num_drafted


def rows_of(
    choice: Choice, ahead: list[RowAhead], is_accepted: bool, has_proposal: bool
) -> list[RowOutcome]:
    """Return the outcome of every row, which accepts all its tokens or none."""
    rows = []
    for row in ahead:
        num = min(choice.num_draft_tokens, row.num_left - 1)
        rows.append(
            RowOutcome(row.row_id, num, num * is_accepted, num * is_accepted + 1, not has_proposal)
        )
    return rows


def outcome_of(
    machine: Machine,
    choice: Choice,
    rows: list[RowOutcome],
    num_rows: int,
    num_unread: int,
    generator: random.Random,
    compiled: set[int],
    sizes: tuple[int, ...] | None,
) -> RoundOutcome:
    """Return the outcome of a round, timed by a noisy clock."""
    width = max(row.num_drafted for row in rows)
    size = next((size for size in sizes or () if size >= width), width) if width else 0
    factor = generator.lognormvariate(0, machine.jitter) * (
        30 if generator.random() < machine.pause_rate else 1
    )
    score_s = factor * (1 + machine.slope * size) + (
        machine.compile_s if size not in compiled else 0.0
    )
    compiled.add(size)
    num_model = min(choice.num_model_tokens, width)
    draft_s = (
        factor * (machine.step_s * num_model + machine.read_s * (num_unread - 1))
        if num_model
        else 0.0
    )
    num_fed = num_unread if num_model else 0
    return RoundOutcome(rows, num_rows, width, num_model, num_fed, draft_s, score_s)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_losses_of_all_calls_stay_within_the_bound(data):
    machine = Machine(
        slope=data.draw(st.floats(0.0, 2.0)),
        step_s=data.draw(st.floats(0.0, 3.0)),
        read_s=data.draw(st.floats(0.0, 0.3)),
        jitter=data.draw(st.sampled_from([0.0, 0.05, 0.2])),
        pause_rate=data.draw(st.sampled_from([0.0, 0.02])),
        compile_s=data.draw(st.sampled_from([0.0, 100.0])),
    )
    has_model, is_free = data.draw(st.sampled_from([(True, False), (False, True), (True, True)]))
    play(
        machine,
        ADVERSARIES[data.draw(st.sampled_from(sorted(ADVERSARIES)))],
        has_model,
        is_free,
        num_rows=data.draw(st.integers(1, 4)),
        num_tokens=data.draw(st.integers(1, 80)),
        seed=data.draw(st.integers(0, 9)),
        step_ratio=data.draw(st.floats(0.0, 0.99)),
        sizes=data.draw(st.sampled_from([None, (2, 4, 8, 10)])),
    )


def test_lying_proposals_use_up_the_account():
    """Keep the probabilities constant, so that only the bound can end drafting."""
    ledger, num_drafted = play(Machine(), ADVERSARIES["useless"], False, True, num_calls=12)
    assert num_drafted > 0
    assert ledger.counted - ledger.replaced > 0.8 * ALLOWANCE


def test_pause_counts_as_twice_the_expected_round():
    steady, paused = (
        play(Machine(pause_rate=rate), ADVERSARIES["always good"], True, False)[1]
        for rate in (0.0, 0.05)
    )
    assert paused > 0.8 * steady
