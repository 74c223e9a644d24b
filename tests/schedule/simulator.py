"""Decoding without models: what a schedule realises on a recorded trace, at costs that are known."""

import random
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import NamedTuple

from hf_speculate.schedule import RoundOutcome, Schedule

NUM_TOKENS = 256
Trace = Sequence[bool]  # by place in the text: whether the draft guesses this token, given the right text before it


class Machine(NamedTuple):
    """Seconds of everything, where a plain step of one row takes about 1."""

    step_s: float = 0.1  # of a draft step
    forward_s: Callable[[int], float] = lambda num_query: 1 + 0.005 * num_query  # of the target, by B * (K + 1)
    other_s: float = 0.02  # of a round
    prompt_s: float = 0.5  # of the draft's prefill
    read_s: float = 0.01  # of a token that the draft did not see while K was 0
    jitter: float = 0.0  # share of a round's seconds, lognormal
    first_call_factor: float = 1.0  # on the first forward of each size
    prefill_s: float = 2.0  # of the target
    prompt_len: int = 64
    pause_rate: float = 0.0  # of rounds in which the process pauses for thirty times as long
    slowness: Callable[[int], float] = lambda num_tokens: 1.0  # of all rounds, by tokens of the shortest live row

    def plain_s(self, num_rows: int) -> float:
        return self.forward_s(num_rows) + self.other_s


def cliff(num_query: int) -> float:
    """A float32 CPU: 4 to 15 rows leave the fast path for one row without reaching that for many."""
    if num_query < 4:
        return 1 + 0.03 * num_query
    return 2.5 if num_query < 16 else 1.3 + 0.01 * num_query


def trace(share: Callable[[float], float], seed: int) -> Trace:
    """A trace whose acceptance at place t of the text is `share(t / NUM_TOKENS)`."""
    rng = random.Random(seed)
    return [rng.random() < share(position / NUM_TOKENS) for position in range(2 * NUM_TOKENS)]


class Run(NamedTuple):
    """What a simulated call did."""

    seconds: float  # of its rounds
    num_tokens: int
    draft_lens: list[int]
    probes: list[int]  # rounds that were probes
    paused_s: float  # of pauses of the process


def plain_rounds_s(machine: Machine, lens: Sequence[int], keeps_rows: bool = False) -> float:
    """Seconds of plain decoding, where row r has `lens[r]` tokens; finished rows stay in the batch if `keeps_rows`."""
    counts = [len(lens) if keeps_rows else sum(length > step for length in lens) for step in range(max(lens))]
    return sum(machine.slowness(step) * machine.plain_s(count) for step, count in enumerate(counts))


def run(
    schedule: Schedule,
    traces: Sequence[Trace],
    machine: Machine,
    num_tokens: int | Sequence[int] = NUM_TOKENS,
    seed: int = 1,
    keeps_rows: bool = False,
) -> Run:
    """Decode `num_tokens` tokens of each row, one number or one of each; rows that have them leave, or stay."""
    rng = random.Random(seed)
    lens = [num_tokens] * len(traces) if isinstance(num_tokens, int) else list(num_tokens)
    rows = dict.fromkeys(range(len(traces)), 0)
    seconds, draft_lens, probes, num_unseen, sizes = 0.0, [], [], 0, set()
    is_drafted, paused_s = False, 0.0
    schedule.begin(machine.prefill_s, machine.prompt_len, machine.prompt_len, max(lens))
    while rows:
        most = max(lens[row] - count for row, count in rows.items()) - 1
        num, row_ids = min(schedule.num_draft_tokens, most), list(rows)
        num_rows = len(traces) if keeps_rows else len(rows)
        num_query = num_rows * (num + 1)
        noise = rng.lognormvariate(0, machine.jitter) * (1 if num_query in sizes else machine.first_call_factor)
        noise *= machine.slowness(min(rows.values()))
        pause = 30 if rng.random() < machine.pause_rate else 1
        sizes.add(num_query)
        score_s, draft_s, num_fed = machine.forward_s(num_query), 0.0, 0
        if num:
            num_fed = 1 + num_unseen + (0 if is_drafted else machine.prompt_len)
            draft_s = num * machine.step_s + machine.read_s * num_unseen
            draft_s += 0 if is_drafted else machine.prompt_s
            is_drafted, num_unseen = True, 0
        else:
            num_unseen += 1
        round_s = noise * (draft_s + score_s + machine.other_s)
        paused_s += (pause - 1) * round_s
        accepted = []
        for row_id in row_ids:
            guesses = traces[row_id][rows[row_id] : rows[row_id] + num]
            accepted.append([*guesses, False].index(False))
        emitted = [min(count + 1, lens[row] - rows[row]) for row, count in zip(row_ids, accepted, strict=True)]
        if schedule.is_probe and len(set(rows.values())) == 1:
            emitted = [min(emitted)] * len(rows)
        for row_id, count in zip(row_ids, emitted, strict=True):
            rows[row_id] += count
        seconds += pause * round_s
        draft_lens.append(num)
        if schedule.is_probe:
            probes.append(len(draft_lens) - 1)
        schedule.update(
            RoundOutcome(
                row_ids,
                [num] * len(row_ids),
                accepted,
                num,
                num_rows,
                [lens[row_id] - rows[row_id] for row_id in row_ids],
                num_fed,
                *(pause * noise * part for part in (draft_s, score_s, machine.other_s)),
                num_emitted=emitted,
            )
        )
        rows = {row_id: count for row_id, count in rows.items() if count < lens[row_id]}
    return Run(seconds, sum(lens), draft_lens, probes, paused_s)


LENS = (0, 3, 0, 0, 5, 1, 0, 2, 0, 0, 0, 4)


class ScriptedSchedule(Schedule):
    """Drafts the given numbers, over and over."""

    def __init__(self, lens=LENS):
        self._lens = cycle(lens)
        self.num_draft_tokens = next(self._lens)
        self.outcomes = []

    def begin(self, prefill_s, num_read, num_unread, num_left):
        self.prompt = prefill_s, num_read, num_unread, num_left

    def update(self, outcome):
        self.outcomes.append(outcome)
        self.num_draft_tokens = next(self._lens)
