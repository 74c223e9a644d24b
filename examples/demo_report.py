"""Print the demo's table, bar chart, coloured text and summary, in 80 columns."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import rich
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from hf_speculate.tools.bench.decoding import Run, Runs, of_equal_texts, ratios
from hf_speculate.tools.bench.methods import OURS, PLAIN, TRANSFORMERS, Method

# limit for max / min over repeated short plain runs, above which the machine was busy
MAX_SPREAD = 1.5
MIN_GAIN = 1.05  # smallest speed-up over plain decoding that is called a gain
KIND_NAMES = {"copying": "tasks that copy text", "plain": "plain questions"}
COLOURS = {PLAIN: "white", TRANSFORMERS: "dark_orange3", OURS: "blue"}
ENGINE_NAMES = {PLAIN: "plain", TRANSFORMERS: "transformers", OURS: "hf_speculate"}


@dataclass(frozen=True)
class Line:
    """One line of the table.

    It identifies the engine, the verifier, and the number of rows decoded together.
    """

    engine: str  # one of `ENGINE_NAMES`
    mode: str  # verifier of hf_speculate
    batch_size: int
    is_sampled: bool
    has_head: bool = False  # whether an EAGLE-3 head drafts instead of the draft model
    kind: str = ""  # kind of prompts: "copying", "plain", or empty if there is only one kind

    @property
    def name(self) -> str:
        return f"{ENGINE_NAMES[self.engine]}, {self.mode}{self.head_name}"

    @property
    def head_name(self) -> str:
        return ", EAGLE-3" if self.has_head else ""

    @property
    def setting(self) -> tuple[str, int, bool]:
        """Setting that the line shares with plain decoding, its baseline."""
        return self.kind, self.batch_size, self.is_sampled

    @property
    def prompts(self) -> str:
        """Description of the prompts."""
        rows = f"{self.batch_size} prompts at once" if self.batch_size > 1 else "1 prompt"
        return f"{KIND_NAMES.get(self.kind, self.kind)}, {rows}" if self.kind else rows


@dataclass
class Tally:
    """Timed calls of one line."""

    runs: list[Run] = field(default_factory=list)
    # The counts of accepted and emitted tokens determine the colours of the printed texts.
    rounds: list[list[tuple[int, int]]] = field(default_factory=list)

    def sum_of(self, name: str) -> int:
        """Return the sum of a count in `SpeculationStats` over all calls."""
        return sum(getattr(run.stats, name) for run in self.runs if run.stats is not None)


Setting = tuple[str, int, bool]
Tallies = dict[Line, Tally]


def speedups(tallies: Tallies, line: Line) -> list[float]:
    """Return the speed-up over plain decoding for each counted pass that measured both."""
    counted = counted_runs(tallies, line.setting)
    plain = next(
        other for other in tallies if other.engine == PLAIN and other.setting == line.setting
    )
    return ratios(counted[line.name], counted[plain.name])


def compared_runs(tallies: Tallies, setting: Setting) -> Runs:
    """Return calls by line, for passes that plain decoding and another method decoded."""
    members = {line: tally.runs for line, tally in tallies.items() if line.setting == setting}
    plain = {run.key for line, runs in members.items() for run in runs if line.engine == PLAIN}
    others = {run.key for line, runs in members.items() for run in runs if line.engine != PLAIN}
    return {
        line.name: [run for run in runs if run.key in plain & others]
        for line, runs in members.items()
    }


def counted_runs(tallies: Tallies, setting: Setting) -> Runs:
    """Return the compared calls from passes in which all methods generated equal texts.

    All sampled calls count.
    """
    methods = [
        Method(line.name, line.engine, do_sample=setting[-1])
        for line in tallies
        if line.setting == setting
    ]
    return of_equal_texts(compared_runs(tallies, setting), methods)


def num_passes(runs: Runs) -> int:
    return len({run.key for of_line in runs.values() for run in of_line})


def compared_speeds(tallies: Tallies) -> dict[Line, list[float]]:
    """Return speed-ups over plain decoding, for settings that also have another method."""
    by_line = {line: speeds for line in tallies if (speeds := speedups(tallies, line))}
    settings = {line.setting for line in by_line if line.engine != PLAIN}
    return {line: speeds for line, speeds in by_line.items() if line.setting in settings}


def print_table(tallies: Tallies, probes_s: Sequence[float]) -> bool:
    """Print a line for each compared method, and return whether the speeds are reliable.

    Args:
        tallies: the measurements.
        probes_s: seconds of repeated runs of one short plain decoding.
    """
    measured = compared_speeds(tallies)
    settings = [
        setting for setting in dict.fromkeys(line.setting for line in tallies) if not setting[-1]
    ]
    num_counted = sum(num_passes(counted_runs(tallies, setting)) for setting in settings)
    num_greedy = sum(num_passes(compared_runs(tallies, setting)) for setting in settings)
    counted = (
        f"{num_counted} of {num_greedy} greedy passes, those in which all methods wrote one text"
    )
    if not measured:
        reason = "the machine is too busy or too slow; set a longer --budget-s"
        if num_greedy and not num_counted:
            reason = "no text is equal in all methods; set --dtype float32"
        print(f"\nSpeeds were not compared: {reason}\n")
        return False
    head = f"{'rows':>4}  {'method':<36}{'tokens/s':>8}  {'speed-up (min, max)':<20}{'length':>7}"
    kinds = list(dict.fromkeys(line.kind for line in measured))
    for kind in kinds:
        print(f"\n{KIND_NAMES.get(kind, kind)}" * bool(kind) + f"\n{head}")
        for line, speeds in measured.items():
            if line.kind == kind:
                print_line(line, tallies, speeds)
    counts = list(map(len, measured.values()))
    min_count, max_count = min(counts), max(counts)
    passes = f"{min_count}" if min_count == max_count else f"{min_count} to {max_count}"
    print(f"medians of alternating passes ({passes}); length: mean acceptance length")
    print(f"counted: {counted}\n")
    factor = max(probes_s) / min(probes_s)
    num_passes_of_kind = min(
        max(len(measured[line]) for line in measured if line.kind == kind) for kind in kinds
    )
    is_reliable = num_passes_of_kind >= 3 and factor <= MAX_SPREAD
    if not is_reliable:
        reason = (
            "fewer than 3 passes"
            if num_passes_of_kind < 3
            else f"the same plain run varied by a factor of {factor:.1f}"
        )
        print(f"NOT RELIABLE: {reason}; run it again on a quiet machine\n")
    return is_reliable


def print_line(line: Line, tallies: Tallies, speeds: list[float]) -> None:
    """Print a line of the table."""
    length = "-"
    if line.engine == OURS:
        num_emitted, num_rounds = (
            tallies[line].sum_of(name) for name in ("num_emitted", "num_rounds")
        )
        length = f"{num_emitted / num_rounds:.2f}" if num_rounds else "1.00"
    spread = f"{median(speeds):.2f}x ({min(speeds):.2f}, {max(speeds):.2f})"
    speed = median(run.tokens_per_s for run in counted_runs(tallies, line.setting)[line.name])
    print(f"{line.batch_size:>4}  {line.name:<36}{speed:>8.1f}  {spread:<20}{length:>7}")


def print_summary(tallies: Tallies, is_reliable: bool) -> None:
    """Print bars for the greedy methods, a sentence per setting and, if reliable, the gains."""
    greedy = {
        line: median(speeds)
        for line, speeds in compared_speeds(tallies).items()
        if not line.is_sampled
    }
    if not greedy:
        return
    scale = 30 / max(greedy.values())
    for setting in dict.fromkeys(line.setting for line in greedy):
        members = [line for line in greedy if line.setting == setting]
        print(f"\n{members[0].prompts}")
        for line in members:
            bar = Text("█" * max(round(greedy[line] * scale), 1), style=COLOURS[line.engine])
            rich.print(
                Text(f"  {ENGINE_NAMES[line.engine] + line.head_name:<23}")
                + bar
                + Text(f" {greedy[line]:.2f}x")
            )
    print()
    gains: dict[bool, list[str]] = {True: [], False: []}
    for setting in dict.fromkeys(line.setting for line in greedy):
        medians = {
            line.engine: (line, greedy[line])
            for line in reversed(greedy)
            if line.setting == setting
        }
        if {OURS, TRANSFORMERS} <= medians.keys():
            (line, ours), (_, theirs) = (medians[engine] for engine in (OURS, TRANSFORMERS))
            peer = f"row by row: {theirs:.2f}x" if line.batch_size > 1 else f"{theirs:.2f}x"
            print(
                f"{line.prompts}: {ours:.2f}x plain decoding; transformers' assisted generation, "
                f"{peer}."
            )
            gains[ours >= MIN_GAIN].append(line.prompts)
    if gains[True] and is_reliable:
        print(f"Gained: {'; '.join(gains[True])}.")
    if gains[False] and is_reliable:
        print(f"hf_speculate did not gain: {'; '.join(gains[False])}.")


def print_text(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    token_ids: Sequence[int],
    rounds: Iterable[tuple[int, int]],
) -> None:
    """Print generated text with accepted drafts in green.

    Args:
        tokenizer: tokenizer of the target.
        prompt: prompt; only the last lines are printed.
        token_ids: the new tokens.
        rounds: number of accepted and emitted tokens of each round; the first new token comes
        before the first round.
    """
    is_drafted = [False]
    for num_accepted, num_emitted in rounds:
        is_drafted += [True] * min(num_accepted, num_emitted) + [False] * (
            num_emitted - num_accepted
        )
    line = Text("\n".join(prompt.splitlines()[-8:]), style="dim") + Text(" >>> ", style="bold")
    before = ""
    for number, drafted in enumerate(is_drafted[: len(token_ids)], 1):
        text = tokenizer.decode(token_ids[:number], skip_special_tokens=True)
        line.append(text[len(before) :], style="green" if drafted else "")
        before = text
    rich.print(line, end="\n\n")
