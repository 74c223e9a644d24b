"""Finds the fields that decode a user's prompts fastest under a rule of quality."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple, Protocol

from hf_speculate.tools.bench.batches import Batch
from hf_speculate.tools.bench.drift import Drift
from hf_speculate.tools.bench.equality import Compared
from hf_speculate.tools.bench.measuring import Decode, Run, Runs, Step, measure, ratios
from hf_speculate.tools.bench.methods import (
    DraftLen,
    Method,
    default_verifier,
    our_methods,
    plain_method,
    split,
    threshold_methods,
)
from hf_speculate.tools.bench.results import finite, spread, total_stats
from hf_speculate.tools.bench.rules import Rule, drop_of

EXACT_VERIFIERS = {False: ("greedy",), True: ("rejection", "block", "coupled")}  # by do_sample
LOSSY_VERIFIERS = ("typical",)
_FIRST_BATCHES = 2
_MIN_LEFT = 2  # methods that stay in the race until the prompts are used up


class Check(Protocol):
    """As `TextCheck`."""

    def __call__(
        self, method: Method, runs: Sequence[Run], plain_runs: Sequence[Run], batches: Mapping[int, Batch]
    ) -> Compared:
        """Compare greedy texts with plain decoding's."""


Read = Callable[[Sequence[Run], Mapping[int, Batch]], Drift]  # how far the texts of a method's calls drifted


class Instruments(NamedTuple):
    """What a tuning measures with.

    Args:
        decode: decodes a batch.
        check: compares greedy texts of exact methods.
        read: says how far texts drifted.
        clock: gives seconds.
        on_step: told of every timed call.
    """

    decode: Decode
    check: Check
    read: Read
    clock: Callable[[], float] = time.perf_counter
    on_step: Callable[[Step], None] | None = None


@dataclass
class Trial:
    """What is known of one method.

    Args:
        method: that is tried.
        runs: its calls so far.
        drift: of its texts, where the rule has bounds.
        complaint: why it is out; empty while it is in the race.
    """

    method: Method
    runs: list[Run] = field(default_factory=list)
    drift: Drift | None = None
    complaint: str = ""


@dataclass(frozen=True)
class Tuned:
    """What a tuning found.

    Args:
        winner: the fastest method that the rule allows; None: plain decoding is at least as fast.
        trials: all that were tried, the last to leave the race first.
        plain_runs: plain decoding's calls.
        plain_drift: of its texts, where the rule has bounds.
        do_sample: whether tokens were drawn.
    """

    winner: Method | None
    trials: list[Trial]
    plain_runs: list[Run]
    plain_drift: Drift | None
    do_sample: bool

    @property
    def fields(self) -> dict[str, Any]:
        """What to write into a generation config; a verifier only where it is not the one that is taken unasked."""
        if self.winner is None:
            return {}
        fields = dict(self.winner.fields)
        if fields["verifier"] == default_verifier(self.do_sample):
            del fields["verifier"]  # so that the other kind of decoding takes its own
        return fields

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "winner": None if self.winner is None else self.winner.name,
            "fields": self.fields,
            "plain_tokens_per_s": spread([run.tokens_per_s for run in self.plain_runs]),
            "tried": [self._entry(trial) for trial in self.trials],
        }

    def _entry(self, trial: Trial) -> dict[str, Any]:
        stats = total_stats(trial.runs)
        entry: dict[str, Any] = {
            "name": trial.method.name,
            "fields": dict(trial.method.fields),
            "num_prompts": sum(len(run.texts) for run in trial.runs),
            "tokens_per_s": spread([run.tokens_per_s for run in trial.runs]),
            "speedup": spread(ratios(trial.runs, self.plain_runs)),
            "acceptance_rate": None if stats is None else stats.acceptance_rate,
            "agreement_with_greedy": None,
            "drop": None,
            "out": trial.complaint or None,
        }
        if trial.drift is not None and self.plain_drift is not None:
            entry["agreement_with_greedy"] = trial.drift.agreement
            entry["drop"] = finite(drop_of(trial.drift, self.plain_drift, self.do_sample))
        return entry


def candidates(
    rule: Rule,
    lens: Sequence[DraftLen],
    thresholds: Sequence[float],
    do_sample: bool,
    fields: Mapping[str, Any],
    verifiers: str = "",
) -> list[Method]:
    """The grid: every verifier that the rule allows, with every number of tokens, lossy ones with every threshold.

    Args:
        rule: of quality.
        lens: numbers of tokens.
        thresholds: `posterior_threshold`s.
        do_sample: whether tokens are drawn.
        fields: of `SpeculationConfig`, for all of them.
        verifiers: names between commas, instead of all that there are.

    Raises:
        ConfigError: see `our_methods`.
    """
    names = split(verifiers) or [*EXACT_VERIFIERS[do_sample], *LOSSY_VERIFIERS]
    methods = [method for method in our_methods(names, lens, do_sample, fields) if not method.is_lossy]
    if not rule.is_exact:
        methods += threshold_methods(names, thresholds, lens, do_sample, fields)
    return methods


def rungs(num_methods: int, num_batches: int) -> list[tuple[int, int]]:
    """For each rung, the most methods that run and the number of further batches: half the methods, twice the batches.

    Args:
        num_methods: in the race.
        num_batches: that there are.
    """
    found, size = [], _FIRST_BATCHES
    while num_batches > 0:
        found.append((num_methods, min(size, num_batches)))
        num_batches -= size
        num_methods, size = min(num_methods, max(_MIN_LEFT, math.ceil(num_methods / 2))), 2 * size
    return found


def num_steps(num_methods: int, num_batches: int) -> int:
    """Timed calls of a tuning at most, plain decoding's among them.

    Args:
        num_methods: in the race.
        num_batches: that there are.
    """
    return sum((num + 1) * size for num, size in rungs(num_methods, num_batches))


def tune(
    methods: Sequence[Method],
    batches: Sequence[Batch],
    rule: Rule,
    instruments: Instruments,
    *,
    do_sample: bool = False,
    seed: int = 0,
) -> Tuned:
    """Let all methods decode a few batches, the faster half of those that the rule allows twice as many, and so on.

    What counts is the median over batches of tokens per second over plain decoding's, which runs beside them.

    Args:
        methods: at least one; all of them draw, or none does.
        batches: at least one, each decoded once by a method.
        rule: of quality.
        instruments: to measure with.
        do_sample: whether tokens are drawn.
        seed: of what is drawn.
    """
    plain, by_number = plain_method(do_sample), {batch.number: batch for batch in batches}
    plain_runs: list[Run] = []
    plain_drift: Drift | None = None
    trials = {method.name: Trial(method) for method in methods}
    ranked = list(trials.values())
    out: list[Trial] = []  # the last to leave the race first
    used = 0
    for number, (num_methods, size) in enumerate(rungs(len(methods), len(batches))):
        slower, ranked = ranked[num_methods:], ranked[:num_methods]
        for trial in slower:
            trial.complaint = "slower"
        out = slower + out
        if not ranked:
            break
        measured = measure(
            [plain, *(trial.method for trial in ranked)],
            batches[used : used + size],
            instruments.decode,
            is_warm=number > 0,
            seed=seed,
            clock=instruments.clock,
            on_step=instruments.on_step,
        )
        used += size
        new_plain = measured.runs[plain.name]
        plain_runs += new_plain
        if not rule.is_exact:
            plain_drift = (plain_drift or Drift()) + instruments.read(new_plain, by_number)
        for trial in ranked:
            _judge(trial, measured.runs, new_plain, rule, instruments, by_number, plain_drift)
        unfit = [trial for trial in ranked if trial.complaint]
        ranked = [trial for trial in ranked if not trial.complaint]
        ranked.sort(key=lambda trial: median(ratios(trial.runs, plain_runs)), reverse=True)
        out = unfit + out
    best = ranked[0] if ranked else None
    wins = best is not None and median(ratios(best.runs, plain_runs)) > 1
    return Tuned(best.method if best is not None and wins else None, ranked + out, plain_runs, plain_drift, do_sample)


def _judge(
    trial: Trial,
    runs: Runs,
    plain_runs: Sequence[Run],
    rule: Rule,
    instruments: Instruments,
    batches: Mapping[int, Batch],
    plain_drift: Drift | None,
) -> None:
    """Add a rung's calls to a trial, and say what speaks against it."""
    new = runs[trial.method.name]
    trial.runs += new
    if trial.method.is_lossy and plain_drift is not None:
        trial.drift = (trial.drift or Drift()) + instruments.read(new, batches)
        trial.complaint = rule.complaint(trial.drift, plain_drift, trial.method.do_sample)
    elif not trial.method.do_sample:
        compared = instruments.check(trial.method, new, plain_runs, batches)
        if not compared.ok:
            trial.complaint = f"not plain decoding's text: {compared}"
