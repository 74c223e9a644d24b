"""Find the fastest settings for given prompts under a quality rule."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from transformers import AutoConfig, GenerationConfig

from hf_speculate.errors import ConfigError
from hf_speculate.tools.atomic_file import replace_file
from hf_speculate.tools.bench.decoding import Batch, Decoder, OnStep, Run, measure, ratios
from hf_speculate.tools.bench.methods import (
    DraftLen,
    Method,
    default_verifier,
    our_methods,
    plain_method,
    split,
)
from hf_speculate.tools.bench.quality import Compared, Drift, Rule, drop_of
from hf_speculate.tools.bench.results import counted_runs, finite, reliability, spread, total_stats

# keyed by do_sample
_VERIFIERS = {False: ("greedy", "typical"), True: ("rejection", "block", "coupled", "typical")}
_FIRST_BATCHES = 2
_MIN_LEFT = 2  # number of methods in the last rung
FILE = "generation_config.json"
# Fields that tuning sets. Their old values are removed from the file.
TUNED_NAMES = {*DraftLen(1, False).fields, "posterior_alpha", "posterior_threshold", "verifier"}


class Instruments(NamedTuple):
    decode: Decoder
    check: Callable[[Method, Sequence[Run], Sequence[Run]], Compared]  # see `TextCheck`
    read: Callable[[Sequence[Run]], Drift]  # see `drift_of_runs`
    on_step: OnStep = lambda method, run: None


@dataclass
class Trial:
    method: Method
    runs: list[Run] = field(default_factory=list)  # calls so far
    # runs used to compare speed: those with equal greedy texts in all exact methods, or all runs if
    # there are none
    counted: list[Run] = field(default_factory=list)
    drift: Drift = field(default_factory=Drift)  # drift of a lossy method's outputs
    complaint: str = ""  # why the method was dropped; empty while it takes part


@dataclass(frozen=True)
class Tuned:
    winner: Method | None  # the fastest allowed method; None if plain decoding is at least as fast
    trials: list[Trial]  # trials of all methods, best first
    plain_runs: list[Run]  # runs of plain decoding
    plain_drift: Drift  # drift of plain decoding's outputs if the rule has bounds
    do_sample: bool  # whether tokens were sampled
    is_interrupted: bool = False  # whether Ctrl-C ended the measurement, which leaves no winner

    @property
    def fields(self) -> dict[str, Any]:
        """The fields for a generation config, without a default verifier."""
        default = ("verifier", default_verifier(self.do_sample))
        return (
            {}
            if self.winner is None
            else dict(item for item in self.winner.fields.items() if item != default)
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "winner": None if self.winner is None else self.winner.name,
            "fields": self.fields,
            "plain_tokens_per_s": spread(run.tokens_per_s for run in self.plain_runs),
            "is_interrupted": self.is_interrupted,
            "reliability": reliability(
                self.plain_runs, 1, sum(len(run.texts) for run in self.plain_runs)
            ),
            "tried": [self._entry(trial) for trial in self.trials],
        }

    def _entry(self, trial: Trial) -> dict[str, Any]:
        is_read = trial.drift.num_tokens > 0
        return {
            "name": trial.method.name,
            "fields": dict(trial.method.fields),
            "num_prompts": sum(len(run.texts) for run in trial.runs),
            "num_counted": sum(len(run.texts) for run in trial.counted),
            "tokens_per_s": spread(run.tokens_per_s for run in trial.counted),
            "speedup": spread(ratios(trial.counted, self.plain_runs)),
            "acceptance_rate": (stats := total_stats(trial.runs)) and stats.acceptance_rate,
            "agreement_with_greedy": trial.drift.agreement if is_read else None,
            "drop": finite(drop_of(trial.drift, self.plain_drift, self.do_sample))
            if is_read
            else None,
            "out": trial.complaint or None,
        }


def candidates(
    rule: Rule,
    lens: Sequence[DraftLen],
    thresholds: Sequence[float],
    do_sample: bool,
    fields: Mapping[str, Any],
    verifiers: str = "",
) -> list[Method]:
    """Make the grid of methods.

    Each allowed verifier is combined with each draft length, and each lossy verifier also with each
    threshold.
    """
    names = split(verifiers) or _VERIFIERS[do_sample]
    methods = [
        method for method in our_methods(names, lens, do_sample, fields) if not method.is_lossy
    ]
    if not rule.is_exact:
        methods += our_methods(names, lens, do_sample, fields, thresholds)
    return methods


def rungs(num_methods: int, num_batches: int) -> list[tuple[int, int]]:
    """Plan the rungs, each of which halves the methods and doubles the batches.

    Returns:
        The maximum number of methods and the number of new batches in each rung.
    """
    sizes, size = [], _FIRST_BATCHES
    while num_batches > 0:
        sizes.append((num_methods, min(size, num_batches)))
        num_batches -= size
        num_methods, size = min(num_methods, max(_MIN_LEFT, math.ceil(num_methods / 2))), 2 * size
    return sizes


def num_steps(num_methods: int, num_batches: int) -> int:
    """Return the maximum number of calls, including plain decoding and warm-ups."""
    return (
        num_methods
        + 1
        + sum((max_methods + 1) * size for max_methods, size in rungs(num_methods, num_batches))
    )


def tune(
    methods: Sequence[Method],
    batches: Sequence[Batch],
    rule: Rule,
    instruments: Instruments,
    seed: int = 0,
) -> Tuned:
    """Find the fastest allowed method by successive halving.

    All methods decode a few batches. The faster half of the allowed methods then decodes twice as
    many, and so on.
    """
    do_sample = methods[0].do_sample
    plain = plain_method(do_sample)
    plain_runs: list[Run] = []
    plain_drift = Drift()
    ranked = [Trial(method) for method in methods]  # fastest first
    dropped: list[Trial] = []  # last dropped first
    num_batches, is_interrupted = 0, False
    for number, (num_methods, size) in enumerate(rungs(len(methods), len(batches))):
        for trial in ranked[num_methods:]:
            trial.complaint = "slower"
        ranked, dropped = ranked[:num_methods], ranked[num_methods:] + dropped
        if not ranked:
            break
        measured = measure(
            [plain, *(trial.method for trial in ranked)],
            batches[num_batches : num_batches + size],
            instruments.decode,
            is_warm=number > 0,
            seed=seed,
            on_step=instruments.on_step,
        )
        num_batches += size
        new_plain = measured.runs.get(plain.name, [])
        plain_runs += new_plain
        for trial in ranked:
            trial.runs += measured.runs.get(trial.method.name, [])
            trial.counted = trial.runs
        if is_interrupted := measured.is_interrupted:
            break
        if not rule.is_exact:
            plain_drift += instruments.read(new_plain)
        for trial in ranked:
            method, new_runs = trial.method, measured.runs[trial.method.name]
            if method.is_lossy:
                trial.drift += instruments.read(new_runs)
                trial.complaint = rule.complaint(trial.drift, plain_drift, do_sample)
            elif not do_sample:
                compared = instruments.check(method, new_runs, new_plain)
                trial.complaint = (
                    f"differs from plain decoding: {compared}" if compared.num_wrong else ""
                )
        dropped = [trial for trial in ranked if trial.complaint] + dropped
        ranked = [trial for trial in ranked if not trial.complaint]
        all_runs = {plain.name: plain_runs} | {trial.method.name: trial.runs for trial in ranked}
        counted, _ = counted_runs(all_runs, [plain, *(trial.method for trial in ranked)], [])
        for trial in ranked:
            trial.counted = counted[trial.method.name]
        ranked.sort(key=lambda trial: median(ratios(trial.counted, plain_runs)), reverse=True)
    trials = [trial for trial in ranked + dropped if trial.runs]
    is_faster = ranked and not is_interrupted and median(ratios(ranked[0].counted, plain_runs)) > 1
    winner = ranked[0].method if is_faster else None
    return Tuned(winner, trials, plain_runs, plain_drift, do_sample, is_interrupted)


def settings_in(folder: Path) -> dict[str, Any]:
    """Read a folder's generation config, or derive one from its model config."""
    path = folder / FILE
    if not path.is_file():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                "the folder of --write must hold a generation_config.json or config.json, got "
                f"{folder}; name the "
                "target's folder, or leave --write out"
            )
        return dict(
            GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder)).to_diff_dict()
        )
    try:
        settings = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} must be a JSON object, got none ({error}); repair the file"
        ) from error
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{path} must be a JSON object, got {type(settings).__name__}; repair the file"
        )
    return settings


def write_fields(folder: Path, fields: Mapping[str, Any]) -> Path:
    """Write fields of `SpeculationConfig` into a folder's generation config; keep other fields.

    Returns:
        The path of the file.
    """
    # with `_from_model_config`, transformers drops unknown fields
    replaced = {*TUNED_NAMES, "_from_model_config"}
    settings = {name: value for name, value in settings_in(folder).items() if name not in replaced}
    path = folder / FILE
    replace_file(
        path, [json.dumps(settings | dict(fields), indent=2, sort_keys=True).encode(), b"\n"]
    )
    return path
