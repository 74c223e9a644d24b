"""Decode texts without models: a schedule chooses, time passes, and rows advance."""

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hf_speculate.draft.acceptance_rates import (
    RowRates,
    model_buckets,
    model_rates,
    suffix_buckets,
    suffix_rates,
)
from hf_speculate.schedule import (
    AdaptiveSchedule,
    ConstantSchedule,
    DraftPrior,
    RoundOutcome,
    RowAhead,
    RowOutcome,
    Schedule,
    ScheduleMemory,
)
from tests.schedule.laboratory.machines import NOISES, Clock, Machine, Noise
from tests.schedule.laboratory.texts import NO_MATCH, Match, Text

PREFILL_STEPS = 4.0  # time of the target's prefill, in plain steps
NUM_CALLS = 30


class Setting(NamedTuple):
    """Settings for the calls of one process."""

    machine: Machine
    num_rows: int = 1
    num_tokens: int = 64
    has_lookup: bool = False
    has_model: bool = False
    num_waiting: int = 0  # number of rows that join when others end
    is_lock_step: bool = False  # all rows advance as far as the slowest
    sizes: tuple[int, ...] | None = None  # compiled sizes of forwards; None without compiling
    compile_factor: float = 1.0  # time of the first forward of a size, in plain steps
    keeps_rows: bool = False  # finished rows stay in the batch
    # Factor for the time of every round, given call and position.
    slowness: Callable[[int, int], float] = lambda call, position: 1.0


class Call(NamedTuple):
    """Rounds of one call."""

    seconds: float  # average time
    widths: list[int]  # one per round
    num_drafted: int
    num_accepted: int


class _Row:
    """Live row, a text up to a position.

    Args:
        row_id: number of the row.
        text: text of the target.
        num_tokens: length of the row.
        rates: acceptance rates of proposals; None if their probabilities do not matter.
    """

    def __init__(self, row_id: int, text: Text, num_tokens: int, rates: RowRates | None) -> None:
        self.row_id, self.text = row_id, text
        self._rates, self._model_rates = rates, RowRates(model_rates())
        self.position, self.num_left = 0, min(num_tokens, text.num_tokens)
        self.num_unread = text.prompt_len + 1

    def match(self) -> Match:
        matches = self.text.matches
        return matches[self.position] if self.position < len(matches) else NO_MATCH

    def proposed(self, match: Match, max_tokens: int) -> Sequence[float]:
        """Return the probabilities of the proposed tokens for which the row has room."""
        num = min(match.num_proposed, self.num_left - 1, max_tokens)
        if self._rates is None:
            return [1.0] * num
        return self._rates.probabilities(suffix_buckets(match.match_len, num))

    def prefers_match(self, proposed: Sequence[float], num_model: int) -> bool:
        """Return whether a proposal should gain as much as the model, as in the hybrid drafter."""
        if not proposed or not num_model:
            return True
        return sum(proposed) >= self._model_rates.expected(model_buckets(num_model))

    def advance(self, outcome: RowOutcome) -> None:
        num_emitted, match = outcome.num_emitted, self.match()
        if self._rates is not None and match.num_proposed:
            num_seen = min(match.num_proposed, num_emitted, match.num_right + 1)
            self._rates.observe(
                suffix_buckets(match.match_len, num_seen), min(match.num_right, num_seen)
            )
        if outcome.is_model and outcome.num_drafted:
            num_seen = min(outcome.num_accepted + 1, outcome.num_drafted)
            self._model_rates.observe(model_buckets(num_seen), outcome.num_accepted)
        self.position += num_emitted
        self.num_left -= num_emitted


class Process:
    """Calls of one process, which share a machine, a clock and compiled sizes."""

    def __init__(
        self, setting: Setting, noise: Noise = NOISES["none"], seed: int = 0, is_rival: bool = False
    ):
        self.setting, self._is_rival = setting, is_rival
        self._clock = Clock(noise, seed)
        self._shared_rates = suffix_rates()
        self._compiled: set[tuple[int, int]] = set()
        self._num_calls = 0
        self._next_row = 0

    def decode(self, schedule: Schedule, texts: Sequence[Text]) -> Call:
        """Decode texts as rows of a call; rows that exceed the batch wait for others to end."""
        setting, machine = self.setting, self.setting.machine
        waiting = [self._row(text) for text in texts]
        live, waiting = waiting[: setting.num_rows], waiting[setting.num_rows :]
        num_rows = len(live)
        if setting.is_lock_step:
            num_left = min(row.num_left for row in live)
            for row in live:
                row.num_left = num_left
        num_call, self._num_calls = self._num_calls, self._num_calls + 1
        prompt_len = max(row.text.prompt_len for row in live)
        schedule.begin(PREFILL_STEPS * machine.score(len(live), 0), prompt_len)
        seconds, widths, num_drafted, num_accepted = 0.0, [], 0, 0
        while live:
            slowness = setting.slowness(num_call, min(row.position for row in live))
            outcome, round_s = self._round(
                schedule, live, slowness, num_rows if setting.keeps_rows else len(live)
            )
            schedule.update(outcome)
            seconds += round_s
            widths.append(outcome.num_draft_tokens)
            num_drafted += sum(row.num_drafted for row in outcome.rows)
            num_accepted += sum(row.num_accepted for row in outcome.rows)
            live = [row for row in live if row.num_left > 0]
            while waiting and len(live) < setting.num_rows:
                live.append(waiting.pop(0))
        return Call(seconds, widths, num_drafted, num_accepted)

    def _row(self, text: Text) -> _Row:
        if not self.setting.has_lookup:
            text = text._replace(matches=())
        elif self._is_rival:
            text = text._replace(matches=text.rival_matches)
        self._next_row += 1
        rates = None if self._is_rival else RowRates(self._shared_rates)
        return _Row(self._next_row, text, self.setting.num_tokens, rates)

    def _round(
        self, schedule: Schedule, live: list[_Row], slowness: float, num_rows: int
    ) -> tuple[RoundOutcome, float]:
        setting, machine = self.setting, self.setting.machine
        matches = [row.match() for row in live]
        proposed = [
            row.proposed(match, machine.max_draft_tokens)
            for row, match in zip(live, matches, strict=True)
        ]
        ahead = [
            RowAhead(row.row_id, row.num_left, tuple(p))
            for row, p in zip(live, proposed, strict=True)
        ]
        if setting.is_lock_step:
            products = tuple(map(math.prod, zip(*proposed, strict=False)))
            ahead = [RowAhead(live[0].row_id, live[0].num_left, products)]
        unread = [row.num_unread for row in live] if setting.has_model else [0]
        num_unread = math.ceil(sum(unread) / len(unread))
        max_tokens = min(max(row.num_left for row in live) - 1, machine.max_draft_tokens)
        choice = schedule.choose(ahead, num_rows, max_tokens, num_unread)
        width, num_model = choice.num_draft_tokens, choice.num_model_tokens
        drafts: list[RowOutcome] = []
        for row, match, of_row in zip(live, matches, proposed, strict=True):
            is_model = num_model > 0 and not (
                of_row and row.prefers_match(of_row[:width], num_model)
            )
            if is_model:
                num, num_right = min(num_model, row.num_left - 1), row.text.runs[row.position]
            else:
                num, num_right = min(len(of_row), width), match.num_right
            accepted = min(num_right, num)
            drafts.append(RowOutcome(row.row_id, num, accepted, accepted + 1, is_model))
        width = max(draft.num_drafted for draft in drafts)
        if setting.is_lock_step or (choice.is_trial and len({row.position for row in live}) == 1):
            fewest = min(draft.num_accepted for draft in drafts)
            drafts = [
                draft._replace(num_accepted=fewest, num_emitted=fewest + 1) for draft in drafts
            ]
        score_s, draft_s = (
            self._score_s(num_rows, width),
            self._draft_s(num_rows, num_model, unread),
        )
        factor = slowness * self._clock.factor()
        for row, draft in zip(live, drafts, strict=True):
            row.num_unread = 1 if num_model else row.num_unread + draft.num_emitted
            row.advance(draft)
        reported = drafts[:1] if setting.is_lock_step else drafts
        outcome = RoundOutcome(
            reported,
            num_rows,
            width,
            num_model,
            num_unread if num_model else 0,
            factor * draft_s,
            factor * score_s,
        )
        return outcome, slowness * self._clock.mean * (score_s + draft_s)

    def _score_s(self, num_rows: int, width: int) -> float:
        setting = self.setting
        if width and setting.sizes:
            width = next((size for size in setting.sizes if size >= width), setting.sizes[-1])
        seconds = setting.machine.score(num_rows, width)
        if (num_rows, width) in self._compiled:
            return seconds
        self._compiled.add((num_rows, width))
        return seconds + (setting.compile_factor - 1) * setting.machine.score(num_rows, 0)

    def _draft_s(self, num_rows: int, num_model: int, num_unread: Sequence[int]) -> float:
        machine = self.setting.machine
        seconds = machine.lookup(num_rows) if self.setting.has_lookup else 0.0
        if num_model:
            seconds += machine.draft(num_rows, num_model) + machine.reading_s(num_unread)
        return seconds


class Result(NamedTuple):
    """Time of each call in a process, with the schedule and with plain decoding."""

    plain_s: list[float]
    calls: list[Call]

    @property
    def speed(self) -> float:
        """Return the speedup over plain decoding."""
        return sum(self.plain_s) / sum(call.seconds for call in self.calls)

    @property
    def first(self) -> float:
        """Return the speedup of the first call over plain decoding."""
        return self.plain_s[0] / self.calls[0].seconds


def batches(texts: Sequence[Text], num_rows: int, num_calls: int) -> list[list[Text]]:
    """Return the texts of each call, taking all texts in one random order after another."""
    generator, queue, calls = random.Random(11), [], []
    for _ in range(num_calls):
        while len(queue) < num_rows:
            queue += generator.sample(list(texts), len(texts))
        calls.append([queue.pop(0) for _ in range(num_rows)])
    return calls


def run(
    process: Process,
    make: Callable[[], Schedule],
    texts: Sequence[Text],
    num_calls: int = NUM_CALLS,
) -> list[Call]:
    """Decode the calls of a process."""
    setting = process.setting
    rows = batches(texts, setting.num_rows + setting.num_waiting, num_calls)
    return [process.decode(make(), of_call) for of_call in rows]


def run_adaptive(
    setting: Setting, texts: Sequence[Text], noise: str, seed: int, num_calls: int = NUM_CALLS
) -> list[Call]:
    """Decode with the adaptive schedule and one memory."""
    machine = setting.machine
    memory = ScheduleMemory(DraftPrior(machine.step_ratio), machine.max_draft_tokens, setting.sizes)
    max_model = machine.max_draft_tokens if setting.has_model else 0
    make = lambda: AdaptiveSchedule(memory, max_model, setting.num_waiting > 0)  # noqa: E731
    return run(Process(setting, NOISES[noise], seed), make, texts, num_calls)


def run_constant(
    setting: Setting,
    texts: Sequence[Text],
    num: int,
    is_rival: bool = False,
    num_calls: int = NUM_CALLS,
) -> list[Call]:
    """Decode with a constant K and an exact clock."""
    make = lambda: ConstantSchedule(num, num if setting.has_model else 0)  # noqa: E731
    return run(Process(setting, is_rival=is_rival), make, texts, num_calls)
