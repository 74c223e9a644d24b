"""Statistics of a speculative call: counts, rates and seconds."""

import importlib
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_speculate.errors import import_extra
from hf_speculate.types import StageSeconds

if TYPE_CHECKING:
    import rich.table

STAGES = StageSeconds._fields
MAX_DRAFT_LENS = 16_384  # maximum number of recorded draft lengths, which take 128 KiB
MAX_PLAIN_STEPS = 256  # maximum number of recorded plain steps per number of rows
# plain steps per number of rows; with fewer, plain steps of earlier calls are used as well
ENOUGH_PLAIN_STEPS = 16
_PLAIN_STEPS = ("plain_step_s_by_rows", "earlier_plain_step_s_by_rows")
_BY_NUMBER = ("rounds_by_draft_len", "replaced_steps", *_PLAIN_STEPS)  # dicts with int keys
_DERIVED = (  # properties in `as_dict`
    *("speedup", "mean_acceptance_length", "acceptance_rate", "acceptance_rate_per_position"),
    *(
        "verified_acceptance_rate",
        "verified_acceptance_rate_per_position",
        "tokens_per_s",
        "total_s",
    ),
    *("num_target_forwards", "num_plain_forwards"),
)


@dataclass
class SpeculationStats:
    """Counts and seconds of one call to `generate()`.

    They cover all runs if a model decodes in several runs. Each call resets them. Times are
    measured on the host. On an accelerator, the cost of work appears in the stage that waits for
    it.
    """

    #: whether the call had a draft source; False if it used plain decoding
    has_draft_source: bool = True
    verifier: str = ""  #: name of the verifier
    plan: str = ""  #: one-line plan of the call (drafter, KV caches, schedule, compiled parts)
    cache: str = ""  #: kind of the target's KV cache, "dynamic", "preallocated" or "hybrid"
    #: names ("target", "draft") of the models that were compiled in every round, or ran as graphs
    #: of compiled code at the end
    compiled: list[str] = field(default_factory=list)
    #: names ("target", "draft") of the models that ran as device graphs in every round
    graphed: list[str] = field(default_factory=list)
    num_rounds: int = 0  #: number of rounds, each counted once per live row
    num_batch_rounds: int = 0  #: number of rounds of the batch
    #: number of batch rounds scored again, because a drafted token may have made logits NaN or
    #: infinite
    num_rescored: int = 0
    num_drafted: int = 0  #: number of valid drafted tokens, summed over rows
    #: number of drafted tokens up to and including the first rejected token of each round
    num_verified: int = 0
    num_accepted: int = 0  #: number of drafted tokens that were accepted and emitted
    num_emitted: int = 0  #: number of tokens emitted by rounds, without each row's first token
    #: number of tokens that rounds added to the longest row; plain decoding takes as many steps
    num_longest: int = 0
    num_host_syncs: int = 0  #: number of times that the library waited for the device
    #: number of calls to processors, criteria or streamers that may have waited for the device
    num_user_host_syncs: int = 0
    status: int = 0  #: combined `Status` flags of all rounds
    lock_step: bool = False  #: whether all rows advanced by the same number of tokens
    fallbacks: list[str] = field(default_factory=list)  #: deviations from the request, with reasons
    #: number of drafted tokens at each position of the draft
    drafted_per_position: list[int] = field(default_factory=list)
    #: number of verified tokens at each position of the draft
    verified_per_position: list[int] = field(default_factory=list)
    #: number of accepted tokens at each position of the draft
    accepted_per_position: list[int] = field(default_factory=list)
    #: number of rounds of each output row; empty if rows are refilled
    rounds_per_row: list[int] = field(default_factory=list)
    #: number of drafted tokens in each output row; empty if rows are refilled
    drafted_per_row: list[int] = field(default_factory=list)
    #: number of accepted tokens in each output row; empty if rows are refilled
    accepted_per_row: list[int] = field(default_factory=list)
    #: number of batch rounds by draft length; length 0 counts the plain steps
    rounds_by_draft_len: dict[int, int] = field(default_factory=dict)
    #: draft lengths of the first 16,384 batch rounds, in order
    draft_lens: list[int] = field(default_factory=list)
    #: seconds of the first 256 rounds without drafts, by number of rows. If there is only one such
    #: round, it counts as no longer than the fastest round with drafts, because it may have been
    #: the first forward of its size
    plain_step_s_by_rows: dict[int, list[float]] = field(default_factory=dict)
    #: the same for the newest 16 plain steps in earlier calls of this type with this target
    earlier_plain_step_s_by_rows: dict[int, list[float]] = field(default_factory=dict)
    #: number of plain decoding steps for the emitted tokens, by number of live rows
    replaced_steps: dict[int, int] = field(default_factory=dict)
    #: seconds from the start of `generate()`; 0 if rows are refilled
    time_to_first_token_s: float = 0.0
    rounds_s: float = 0.0  #: seconds of all rounds
    inputs_s: float = 0.0  #: seconds of transformers' preparation, as in plain decoding
    preparation_s: float = 0.0  #: seconds of the library's preparation before the prefill
    #: seconds for comparing the draft model's vocabulary with the target's
    vocabulary_s: float = 0.0
    prefill_s: float = 0.0  #: seconds of the target's prefill
    draft_s: float = 0.0  #: seconds of drafting
    score_s: float = 0.0  #: seconds of the target's forwards in rounds
    verify_s: float = 0.0  #: seconds of verification
    bookkeeping_s: float = 0.0  #: seconds of everything else

    def reset(self) -> None:
        """Reset all fields in place."""
        vars(self).update(vars(SpeculationStats()))

    def __add__(self, other: "SpeculationStats") -> "SpeculationStats":
        """Add the counts and seconds of two calls; names that differ become empty."""
        return SpeculationStats(
            **{name: add(getattr(self, name), getattr(other, name)) for name, add in _ADD.items()}
        )

    def add_fallback(self, reason: str) -> None:
        """Record a deviation from the request, once per reason."""
        if reason not in self.fallbacks:
            self.fallbacks.append(reason)

    def add_eager_part(self, part: str, reason: str) -> None:
        """Record that a model, "target" or "draft", runs eagerly from now on."""
        for parts in (self.compiled, self.graphed):
            if part in parts:
                parts.remove(part)
        self.add_fallback(f"{part}: {reason}")

    def add_code_part(self, part: str, reason: str) -> None:
        """Record that a model runs from graphs of compiled code from now on.

        If a reason is given, the model instead runs from graphs of its original code.
        """
        if reason:
            if part in self.compiled:
                self.compiled.remove(part)
            self.add_fallback(f"{part}: {reason}")
            return
        for parts in (self.compiled, self.graphed):
            if part not in parts:
                parts.append(part)
                parts.sort(reverse=True)  # the target comes first

    def add_row(
        self, num_drafted: int, num_accepted: int, num_emitted: int, num_verified: int | None = None
    ) -> None:
        """Count one round of one row.

        Args:
            num_drafted: number of drafted tokens.
            num_accepted: number of accepted tokens.
            num_emitted: number of emitted tokens.
            num_verified: number of verified tokens.
                None to count all tokens up to and including the first rejected one.
        """
        if num_verified is None:
            num_verified = min(num_accepted + 1, num_drafted)
        self.num_rounds += 1
        self.num_drafted += num_drafted
        self.num_verified += num_verified
        self.num_accepted += num_accepted
        self.num_emitted += num_emitted
        missing = num_drafted - len(self.drafted_per_position)
        for counts in (
            self.drafted_per_position,
            self.verified_per_position,
            self.accepted_per_position,
        ):
            counts += [0] * missing
        for position in range(num_drafted):
            self.drafted_per_position[position] += 1
            self.verified_per_position[position] += position < num_verified
            self.accepted_per_position[position] += position < num_accepted

    def add_to_row(self, row_id: int, num_drafted: int, num_accepted: int) -> None:
        """Add a round to the counts of one output row."""
        per_row = self.rounds_per_row, self.drafted_per_row, self.accepted_per_row
        for counts, count in zip(per_row, (1, num_drafted, num_accepted), strict=True):
            counts += [0] * (row_id + 1 - len(counts))
            counts[row_id] += count

    def add_draft_len(self, num_drafted: int) -> None:
        """Count a batch round with a draft of `num_drafted` tokens."""
        self.rounds_by_draft_len[num_drafted] = self.rounds_by_draft_len.get(num_drafted, 0) + 1
        if len(self.draft_lens) < MAX_DRAFT_LENS:
            self.draft_lens.append(num_drafted)

    def add_seconds(self, seconds: StageSeconds) -> None:
        """Add seconds per stage."""
        for stage, spent in zip(STAGES, seconds, strict=True):
            setattr(self, f"{stage}_s", getattr(self, f"{stage}_s") + spent)

    def add_plain_step(self, seconds: float, num_rows: int = 1) -> None:
        """Record the duration of a round without drafts."""
        steps_s = self.plain_step_s_by_rows.setdefault(num_rows, [])
        if len(steps_s) < MAX_PLAIN_STEPS:
            steps_s.append(seconds)

    @property
    def mean_acceptance_length(self) -> float:
        """Emitted tokens per row and round, including the bonus token; 0 before the first round."""
        return self.num_emitted / self.num_rounds if self.num_rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens divided by drafted tokens, in [0, 1]; 0 if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """Accepted tokens divided by drafted tokens at each position of the draft."""
        return _ratios(self.accepted_per_position, self.drafted_per_position)

    @property
    def verified_acceptance_rate(self) -> float:
        """Accepted tokens divided by verified tokens, in [0, 1]; 0 if nothing was verified.

        Tokens after the first rejected token do not count.
        """
        return self.num_accepted / self.num_verified if self.num_verified else 0.0

    @property
    def verified_acceptance_rate_per_position(self) -> list[float]:
        """Accepted tokens divided by verified tokens at each position of the draft.

        A token counts only if all tokens before it in the draft were accepted.
        """
        num_positions = len([count for count in self.verified_per_position if count])
        return _ratios(
            self.accepted_per_position[:num_positions], self.verified_per_position[:num_positions]
        )

    @property
    def speedup(self) -> float | None:
        """Estimated speed-up of the whole call over plain decoding.

        The result is None if no plain steps were measured.

        The estimate for plain decoding leaves out the library's own preparation and replaces the
        rounds with the steps in `replaced_steps`. The time of a step is the median of the plain
        steps with the same number of rows, or is interpolated between two numbers of rows. If the
        call took fewer than 16 plain steps, plain steps of earlier calls of its type are used as
        well.
        """
        steps = self.measured_steps()
        if not steps or self.total_s <= 0:
            return None
        measured = sorted(steps)
        medians = [median(steps[num_rows]) for num_rows in measured]
        replaced = self.replaced_steps.items()
        steps_s = sum(
            num_steps * float(np.interp(num_rows, measured, medians))
            for num_rows, num_steps in replaced
        )
        return (
            self.total_s - self.preparation_s - self.vocabulary_s - self.rounds_s + steps_s
        ) / self.total_s

    @property
    def num_target_forwards(self) -> int:
        """Number of target forwards after the prompt."""
        return self.num_batch_rounds + self.num_rescored

    @property
    def num_plain_forwards(self) -> int:
        """Number of forwards after the prompt in plain decoding, for the same emitted tokens."""
        return sum(self.replaced_steps.values())

    @property
    def seconds_by_stage(self) -> dict[str, float]:
        """Seconds of each stage by name, from inputs to bookkeeping."""
        return {stage: getattr(self, f"{stage}_s") for stage in STAGES}

    @property
    def total_s(self) -> float:
        """Seconds of the whole call, from the start of `generate()` to its end."""
        return sum(self.seconds_by_stage.values())

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens of all rows per second after the prefill; 0 before the first round."""
        decoding_s = (
            self.total_s - self.inputs_s - self.preparation_s - self.vocabulary_s - self.prefill_s
        )
        return self.num_emitted / decoding_s if decoding_s > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return all counts and derived rates as JSON-compatible values."""
        by_number = {name: dict(sorted(getattr(self, name).items())) for name in _BY_NUMBER}
        with_text_keys = {
            name: {str(key): value for key, value in counts.items()}
            for name, counts in by_number.items()
        }
        return asdict(self) | with_text_keys | {name: getattr(self, name) for name in _DERIVED}

    def to_pandas(self) -> Any:
        """Convert `as_dict()` to a data frame with one row.

        Each position gets a column, and lists of strings are joined.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        row: dict[str, Any] = {}
        for name, value in self.as_dict().items():
            if name in ("compiled", "graphed", "fallbacks"):
                row[name] = "; ".join(value)
            elif not isinstance(value, dict | list):
                row[name] = value
        rates = enumerate(self.acceptance_rate_per_position, 1)
        row |= {f"acceptance_rate_{position}": rate for position, rate in rates}
        return import_extra("pandas", "plot").DataFrame([row])

    def summary(self) -> str:
        """Return speed-up, target forwards, acceptance length and rate, and seconds in one line."""
        line: str = _rendering().summary(self)
        return line

    @property
    def headline(self) -> str:
        """Estimated speed-up over plain decoding, or the reason why there is no estimate."""
        line: str = _rendering().headline(self)
        return line

    def as_table(self) -> "rich.table.Table":
        """Return a rich table, which `rich.print(stats)` prints."""
        table: rich.table.Table = _rendering().as_table(self)
        return table

    __rich__ = as_table

    def _repr_mimebundle_(
        self, include: Sequence[str], exclude: Sequence[str], **options: Any
    ) -> dict[str, str]:
        """Render the table in a notebook."""
        return self.as_table()._repr_mimebundle_(include, exclude, **options)

    def plot(self) -> Any:
        """Plot the acceptance rate per position, the draft length by round, and seconds by stage.

        Returns:
            A `matplotlib.figure.Figure`.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        return importlib.import_module("hf_speculate.tools.plotting").make_figure(
            self.headline,
            self.acceptance_rate_per_position,
            self.draft_lens,
            self.num_batch_rounds,
            self.seconds_by_stage,
        )

    def __str__(self) -> str:
        text: str = _rendering().text(self)
        return text

    def measured_steps(self) -> dict[int, list[float]]:
        """Return seconds per plain step by number of rows, including earlier calls if too few."""
        current, earlier = self.plain_step_s_by_rows, self.earlier_plain_step_s_by_rows
        steps = {}
        for num_rows in current.keys() | earlier.keys():
            measured = current.get(num_rows, [])
            num_lacking = max(ENOUGH_PLAIN_STEPS - len(measured), 0)
            newest_first = earlier.get(num_rows, [])[::-1]
            steps[num_rows] = measured + newest_first[:num_lacking]
        return steps


_COUNTS = tuple(
    entry.name
    for entry in fields(SpeculationStats)
    if entry.name.endswith(("_per_position", "_per_row"))
)
# Field name -> function that adds two of its values.
_ADD: dict[str, Callable[[Any, Any], Any]] = {
    **{entry.name: operator.add for entry in fields(SpeculationStats)},
    **dict.fromkeys(
        ("verifier", "plan", "cache"), lambda first, second: first if first == second else ""
    ),
    **dict.fromkeys(
        ("compiled", "graphed", "fallbacks"),
        lambda first, second: list(dict.fromkeys([*first, *second])),
    ),
    **dict.fromkeys(("status", "lock_step", "has_draft_source"), operator.or_),
    **dict.fromkeys(
        _COUNTS,
        lambda first, second: [sum(pair) for pair in zip_longest(first, second, fillvalue=0)],
    ),
    **dict.fromkeys(
        ("rounds_by_draft_len", "replaced_steps"),
        lambda first, second: dict(Counter(first) + Counter(second)),
    ),
    "draft_lens": lambda first, second: (first + second)[:MAX_DRAFT_LENS],
    "plain_step_s_by_rows": lambda first, second: {
        num_rows: [*first.get(num_rows, ()), *second.get(num_rows, ())][:MAX_PLAIN_STEPS]
        for num_rows in first | second
    },
    # The second call may include the steps of the first.
    "earlier_plain_step_s_by_rows": lambda first, second: second | first,
}


def _ratios(numerators: list[int], denominators: list[int]) -> list[float]:
    return [
        numerator / denominator
        for numerator, denominator in zip(numerators, denominators, strict=True)
    ]


def _rendering() -> Any:
    """Import the module that renders statistics, which imports rich."""
    return importlib.import_module("hf_speculate.tools.rendering")
