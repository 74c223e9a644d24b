"""What the demo prints: a table, a bar chart, coloured text and one sentence, in 80 columns."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import rich
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

MAX_SPREAD = 1.5  # of plain decoding's speed between passes; beyond it the machine was busy
COLOURS = {"plain": "white", "transformers": "dark_orange3", "hf_speculate": "blue"}


@dataclass(frozen=True)
class Method:
    """One line of the table: who decodes, with which verifier, how many rows at a time."""

    engine: str  # "plain", "transformers" or "hf_speculate"
    mode: str  # the verifier of hf_speculate
    batch_size: int
    is_sampled: bool
    has_head: bool = False  # whether an EAGLE-3 head drafts in place of the draft model

    @property
    def name(self) -> str:
        return f"{self.engine}, {self.mode}{self.head_name}"

    @property
    def head_name(self) -> str:
        return ", EAGLE-3" if self.has_head else ""


@dataclass
class Tally:
    """What the runs of one method added up to."""

    tokens_per_s: list[float] = field(default_factory=list)  # one entry per pass
    num_tokens: int = 0
    num_target_calls: int = 0
    num_rounds: int = 0
    num_emitted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    outputs: list[tuple[dict[str, Tensor], Tensor]] = field(default_factory=list)  # inputs and new tokens, per pass
    rounds: list[list[tuple[int, int]]] = field(default_factory=list)  # accepted and emitted, where they are shown


def speedups(tallies: dict[Method, Tally], method: Method) -> list[float]:
    """Speed over plain decoding of the same kind, for each pass that measured both."""
    same = [one for one in tallies if (one.batch_size, one.is_sampled) == (method.batch_size, method.is_sampled)]
    (plain,) = [one for one in same if one.engine == "plain"]
    pairs = zip(tallies[method].tokens_per_s, tallies[plain].tokens_per_s, strict=False)
    return [ours / theirs for ours, theirs in pairs]


def compared_speeds(tallies: dict[Method, Tally]) -> dict[Method, list[float]]:
    """Speeds over plain decoding, of each kind of which more than plain decoding was measured."""
    ratios = {method: found for method in tallies if (found := speedups(tallies, method))}
    kinds = {(one.batch_size, one.is_sampled) for one in ratios if one.engine != "plain"}
    return {method: found for method, found in ratios.items() if (method.batch_size, method.is_sampled) in kinds}


def busy_factor(tallies: dict[Method, Tally]) -> float:
    """The largest ratio between the fastest and the slowest pass of a plain method."""
    plain = [tally.tokens_per_s for method, tally in tallies.items() if method.engine == "plain"]
    return max(max(speeds) / min(speeds) for speeds in plain if speeds)


def print_table(tallies: dict[Method, Tally]) -> None:
    """A line for each method whose speed was compared with plain decoding's."""
    measured = compared_speeds(tallies)
    if not measured:
        print("\nSpeeds were not compared: the machine is too busy or too slow; set a longer --budget-s\n")
        return
    print(f"\n{'rows':>4}  {'method':<36}{'tokens/s':>8}  {'speed-up (min, max)':<20}{'length':>7}")
    for method, ratios in measured.items():
        tally, length = tallies[method], "-"
        if method.engine == "hf_speculate":
            length = f"{tally.num_emitted / tally.num_rounds:.2f}" if tally.num_rounds else "1.00"
        spread = f"{median(ratios):.2f}x ({min(ratios):.2f}, {max(ratios):.2f})"
        speed = median(tally.tokens_per_s)
        print(f"{method.batch_size:>4}  {method.name:<36}{speed:>8.1f}  {spread:<20}{length:>7}")
    num_passes = min(len(tallies[method].tokens_per_s) for method in measured)
    print(f"medians of alternating passes ({num_passes}); length: mean acceptance length\n")
    factor = busy_factor(tallies)
    if num_passes < 3 or factor > MAX_SPREAD:
        reason = "fewer than 3 passes" if num_passes < 3 else f"plain decoding varied by a factor of {factor:.1f}"
        print(f"NOT RELIABLE: {reason}; run it again on a quiet machine\n")


def print_summary(tallies: dict[Method, Tally]) -> None:
    """A bar for each greedy method that was measured, and a sentence for each number of rows."""
    greedy = {method: median(ratios) for method, ratios in compared_speeds(tallies).items() if not method.is_sampled}
    if not greedy:
        return
    scale = 30 / max(greedy.values())
    print()
    for method, speedup in greedy.items():
        rows = f"{method.batch_size} row{'s' * (method.batch_size > 1)}"
        bar = Text("█" * max(round(speedup * scale), 1), style=COLOURS[method.engine])
        rich.print(Text(f"{rows:>6}  {method.engine + method.head_name:<23}") + bar + Text(f" {speedup:.2f}x"))
    print()
    for batch_size in dict.fromkeys(method.batch_size for method in greedy):
        medians = {one.engine: greedy[one] for one in reversed(greedy) if one.batch_size == batch_size}
        if {"hf_speculate", "transformers"} <= medians.keys():
            ours, theirs = (f"{medians[engine]:.2f}x" for engine in ("hf_speculate", "transformers"))
            rows = f"{batch_size} prompts at once" if batch_size > 1 else "1 prompt"
            theirs = f"row by row: {theirs}" if batch_size > 1 else theirs
            print(f"{rows}: {ours} plain decoding; transformers' assisted generation, {theirs}.")


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
