"""What the demo prints: a table, a bar chart, coloured text and one sentence, in 80 columns."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import rich
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

MAX_SPREAD = 1.5  # of the same short plain run, again and again; beyond it the machine was busy
MIN_GAIN = 1.05  # times plain decoding, from which a gain is called one
KIND_NAMES = {"copying": "tasks that copy text", "plain": "plain questions"}
COLOURS = {"plain": "white", "transformers": "dark_orange3", "hf_speculate": "blue"}


@dataclass(frozen=True)
class Method:
    """One line of the table: who decodes, with which verifier, how many rows at a time."""

    engine: str  # "plain", "transformers" or "hf_speculate"
    mode: str  # the verifier of hf_speculate
    batch_size: int
    is_sampled: bool
    has_head: bool = False  # whether an EAGLE-3 head drafts in place of the draft model
    kind: str = ""  # of the prompts: "copying", "plain", or empty where they are of one kind

    @property
    def name(self) -> str:
        return f"{self.engine}, {self.mode}{self.head_name}"

    @property
    def head_name(self) -> str:
        return ", EAGLE-3" if self.has_head else ""

    @property
    def setting(self) -> tuple[str, int, bool]:
        """What it shares with the plain decoding that it is compared with."""
        return self.kind, self.batch_size, self.is_sampled

    @property
    def prompts(self) -> str:
        """What it decodes, in words."""
        rows = f"{self.batch_size} prompts at once" if self.batch_size > 1 else "1 prompt"
        return f"{KIND_NAMES.get(self.kind, self.kind)}, {rows}" if self.kind else rows


@dataclass
class Tally:
    """What the runs of one method added up to."""

    tokens_per_s: list[float] = field(default_factory=list)  # one entry per pass
    num_tokens: int = 0
    num_target_calls: int = 0
    num_rounds: int = 0
    num_emitted: int = 0
    num_verified: int = 0
    texts: list[list[list[int]]] = field(default_factory=list)  # new tokens of each row up to its end, per pass
    outputs: list[tuple[dict[str, Tensor], Tensor]] = field(default_factory=list)  # inputs and new tokens, per pass
    rounds: list[list[tuple[int, int]]] = field(default_factory=list)  # accepted and emitted, where they are shown


def speedups(tallies: dict[Method, Tally], method: Method) -> list[float]:
    """Speed over plain decoding of the same setting, for each pass that counts and measured both."""
    ours, plain = tallies[method].tokens_per_s, plain_of(tallies, method.setting).tokens_per_s
    counted = counted_passes(tallies, method.setting)
    return [ours[number] / plain[number] for number in counted if number < len(ours)]


def plain_of(tallies: dict[Method, Tally], setting: tuple[str, int, bool]) -> Tally:
    """Plain decoding of a setting."""
    (plain,) = [tally for method, tally in tallies.items() if method.engine == "plain" and method.setting == setting]
    return plain


def counted_passes(tallies: dict[Method, Tally], setting: tuple[str, int, bool]) -> list[int]:
    """Numbers of the passes of a setting in which all methods wrote one text; all compared ones if they sample.

    A method that follows another text at a near-tie meets other drafts: its speed says nothing of the others.
    """
    plain, is_sampled = plain_of(tallies, setting), setting[-1]
    texts = [tally.texts for method, tally in tallies.items() if method.setting == setting and tally is not plain]
    return [
        number
        for number, text in enumerate(plain.texts[: num_compared(tallies, setting)])
        if is_sampled or all(of_it[number] == text for of_it in texts if number < len(of_it))
    ]


def num_compared(tallies: dict[Method, Tally], setting: tuple[str, int, bool]) -> int:
    """Passes of a setting that plain decoding and another method decoded."""
    members = [(method, tally) for method, tally in tallies.items() if method.setting == setting]
    most = max((len(tally.texts) for method, tally in members if method.engine != "plain"), default=0)
    return min(most, len(plain_of(tallies, setting).texts))


def compared_speeds(tallies: dict[Method, Tally]) -> dict[Method, list[float]]:
    """Speeds over plain decoding, of each setting of which more than plain decoding was measured."""
    ratios = {method: found for method in tallies if (found := speedups(tallies, method))}
    settings = {one.setting for one in ratios if one.engine != "plain"}
    return {method: found for method, found in ratios.items() if method.setting in settings}


def print_table(tallies: dict[Method, Tally], probes_s: Sequence[float]) -> bool:
    """A line for each method whose speed was compared with plain decoding's; whether the speeds are reliable.

    Args:
        tallies: what was measured.
        probes_s: seconds of the same short plain run at several times.
    """
    measured = compared_speeds(tallies)
    settings = [setting for setting in dict.fromkeys(method.setting for method in tallies) if not setting[-1]]
    num_counted = sum(len(counted_passes(tallies, setting)) for setting in settings)
    num_greedy = sum(num_compared(tallies, setting) for setting in settings)
    counted = f"{num_counted} of {num_greedy} greedy passes, those in which all methods wrote one text"
    if not measured:
        reason = "the machine is too busy or too slow; set a longer --budget-s"
        if num_greedy and not num_counted:
            reason = "no text is equal in all methods; set --dtype float32"
        print(f"\nSpeeds were not compared: {reason}\n")
        return False
    head = f"{'rows':>4}  {'method':<36}{'tokens/s':>8}  {'speed-up (min, max)':<20}{'length':>7}"
    kinds = list(dict.fromkeys(method.kind for method in measured))
    for kind in kinds:
        print(f"\n{KIND_NAMES.get(kind, kind)}" * bool(kind) + f"\n{head}")
        for method, ratios in measured.items():
            if method.kind == kind:
                print_line(method, tallies, ratios)
    counts = list(map(len, measured.values()))
    least, most = min(counts), max(counts)
    num_passes = f"{least}" if least == most else f"{least} to {most}"
    print(f"medians of alternating passes ({num_passes}); length: mean acceptance length")
    print(f"counted: {counted}\n")
    factor = max(probes_s) / min(probes_s)
    most_of_kind = min(max(len(measured[one]) for one in measured if one.kind == kind) for kind in kinds)
    is_reliable = most_of_kind >= 3 and factor <= MAX_SPREAD
    if not is_reliable:
        reason = "fewer than 3 passes" if most_of_kind < 3 else f"the same plain run varied by a factor of {factor:.1f}"
        print(f"NOT RELIABLE: {reason}; run it again on a quiet machine\n")
    return is_reliable


def print_line(method: Method, tallies: dict[Method, Tally], ratios: list[float]) -> None:
    """A line of the table."""
    tally, length = tallies[method], "-"
    if method.engine == "hf_speculate":
        length = f"{tally.num_emitted / tally.num_rounds:.2f}" if tally.num_rounds else "1.00"
    spread = f"{median(ratios):.2f}x ({min(ratios):.2f}, {max(ratios):.2f})"
    counted = counted_passes(tallies, method.setting)
    speed = median(tally.tokens_per_s[number] for number in counted if number < len(tally.tokens_per_s))
    print(f"{method.batch_size:>4}  {method.name:<36}{speed:>8.1f}  {spread:<20}{length:>7}")


def print_summary(tallies: dict[Method, Tally], is_reliable: bool) -> None:
    """Bars of the greedy methods that were measured, a sentence for each setting, and, if reliable, what was gained."""
    greedy = {method: median(ratios) for method, ratios in compared_speeds(tallies).items() if not method.is_sampled}
    if not greedy:
        return
    scale = 30 / max(greedy.values())
    for setting in dict.fromkeys(method.setting for method in greedy):
        members = [method for method in greedy if method.setting == setting]
        print(f"\n{members[0].prompts}")
        for method in members:
            bar = Text("█" * max(round(greedy[method] * scale), 1), style=COLOURS[method.engine])
            rich.print(Text(f"  {method.engine + method.head_name:<23}") + bar + Text(f" {greedy[method]:.2f}x"))
    print()
    gains: dict[bool, list[str]] = {True: [], False: []}
    for setting in dict.fromkeys(method.setting for method in greedy):
        medians = {one.engine: (one, greedy[one]) for one in reversed(greedy) if one.setting == setting}
        if {"hf_speculate", "transformers"} <= medians.keys():
            (method, ours), (_, theirs) = (medians[engine] for engine in ("hf_speculate", "transformers"))
            peer = f"row by row: {theirs:.2f}x" if method.batch_size > 1 else f"{theirs:.2f}x"
            print(f"{method.prompts}: {ours:.2f}x plain decoding; transformers' assisted generation, {peer}.")
            gains[ours >= MIN_GAIN].append(method.prompts)
    if gains[True] and is_reliable:
        print(f"Gained: {'; '.join(gains[True])}.")
    if gains[False] and is_reliable:
        print(f"Nothing to be gained here: {'; '.join(gains[False])}.")


def print_text(
    tokenizer: PreTrainedTokenizerBase, prompt: str, token_ids: Sequence[int], rounds: Iterable[tuple[int, int]]
) -> None:
    """Print generated text with accepted drafts in green.

    Args:
        tokenizer: of the target.
        prompt: its last lines are shown.
        token_ids: the new tokens.
        rounds: accepted drafts and emitted tokens of each round; the first token comes before the first round.
    """
    is_drafted = [False]
    for num_accepted, num_emitted in rounds:
        is_drafted += [True] * min(num_accepted, num_emitted) + [False] * (num_emitted - num_accepted)
    line = Text("\n".join(prompt.splitlines()[-8:]), style="dim") + Text(" >>> ", style="bold")
    before = ""
    for number, drafted in enumerate(is_drafted[: len(token_ids)], 1):
        text = tokenizer.decode(token_ids[:number], skip_special_tokens=True)
        line.append(text[len(before) :], style="green" if drafted else "")
        before = text
    rich.print(line, end="\n\n")
