"""Compare greedy texts of the demo with plain decoding, and distinguish rounding from errors."""

import time
from collections.abc import Sequence
from dataclasses import replace

from demo_decoding import ASSISTED_K, OURS_GREEDY, PLAIN_GREEDY, Pair, decode
from demo_report import Line, Tallies
from hf_speculate.tools.bench.decoding import Batch, Run
from hf_speculate.tools.bench.methods import OURS
from hf_speculate.tools.bench.quality import TextCheck
from hf_speculate.tools.checks.near_ties import ParityRow


class Comparison:
    """Verdicts on the greedy texts of a pair.

    Args:
        pair: the models that decode.
    """

    def __init__(self, pair: Pair):
        # The draft length is constant, because a schedule that chose plain decoding would leave
        # nothing to compare.
        self.pair = replace(pair, num_assistant_tokens=pair.num_assistant_tokens or ASSISTED_K)
        self.check = TextCheck(pair.decoder)
        self.num_texts = self.num_equal = self.num_wrong = 0
        self.num_verified = 0  # drafted tokens, over all texts
        self.notes: list[str] = []

    @property
    def is_failed(self) -> bool:
        """Whether a text is wrong, or no compared text had verified drafts."""
        return self.num_wrong > 0 or self.num_verified == 0

    def add_measured(self, tallies: Tallies) -> None:
        """Compare the measured texts with plain decoding of the same prompts."""
        for line, tally in tallies.items():
            if line.engine == OURS and not line.is_sampled:
                plain = tallies[replace(PLAIN_GREEDY, batch_size=line.batch_size, kind=line.kind)]
                expected = {run.key: run for run in plain.runs}
                for run in tally.runs:
                    if run.key in expected:  # the last pass may be incomplete
                        self.add(line, run, expected[run.key])

    def add_until(self, end: float, batches: Sequence[Batch], max_new_tokens: int) -> None:
        """Decode prompts with and without drafts until the time is over.

        Continue past the limit until at least one drafted token has been verified.
        """
        longest_s = 0.0
        for batch in batches:
            begin = time.perf_counter()
            if self.num_verified and begin + longest_s > end:
                break
            expected = decode(PLAIN_GREEDY, self.pair, batch, max_new_tokens, seed=0)
            ours = decode(OURS_GREEDY, self.pair, batch, max_new_tokens, seed=0)
            self.add(OURS_GREEDY, ours, expected)
            longest_s = max(longest_s, time.perf_counter() - begin)

    def add(self, line: Line, ours: Run, expected: Run) -> None:
        """Compare the texts from a call with those from plain decoding of the same batch."""
        self.num_verified += 0 if ours.stats is None else ours.stats.num_verified
        for row in self.check.rows(self.pair.method(line), ours, expected.texts):
            self.num_texts += 1
            self.num_equal += row.verdict == "equal"
            self.num_wrong += row.verdict == "bug"
            if row.verdict != "equal":
                self.notes.append(_note(row))

    def print(self, dtype: str) -> None:
        print(
            f"{dtype}: {self.num_equal} of {self.num_texts} greedy texts are identical to plain "
            "generate()"
        )
        for note in self.notes:
            print(f"  {note}")
        if not self.num_verified:
            print("  WRONG: no drafted token was verified")


def _note(row: ParityRow) -> str:
    """Describe how a row differs from plain decoding."""
    if row.position is None:
        return f"WRONG: {row.reason}"
    kind = "near-tie" if row.verdict == "tie" else "WRONG"
    gap = f"logits {row.gap:.2g} apart, rounding explains {row.bound:.2g}"
    return f"{kind} at token {row.position}: {gap}"
