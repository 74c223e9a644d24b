"""Measures ways against plain decoding, and says what each of them is worth."""

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

from hf_speculate.tools.bench.batches import Batch
from hf_speculate.tools.bench.decoding import Decoder
from hf_speculate.tools.bench.drift import drift_of_runs
from hf_speculate.tools.bench.equality import TextCheck
from hf_speculate.tools.bench.measuring import Measured, Step, measure, plain_of
from hf_speculate.tools.bench.results import category_entries, drift_entry, way_entry
from hf_speculate.tools.bench.ways import OURS, PLAIN, Way, plain_way


@dataclass(frozen=True)
class Comparison:
    """What is to be compared.

    Args:
        ways: beside plain decoding; all of them draw, or none does.
        drift_ways: lossy ones that are only looked at for speed and drift.
        batches: of prompts, at least one.
        do_sample: whether tokens are drawn.
        repeats: how often every batch is decoded by every way.
        seed: of what is drawn.
    """

    ways: Sequence[Way]
    drift_ways: Sequence[Way]
    batches: Sequence[Batch]
    do_sample: bool = False
    repeats: int = 1
    seed: int = 0

    @property
    def all_ways(self) -> list[Way]:
        """All that is timed: plain decoding first, of the other kind too where drift is looked at."""
        others = [plain_way(not self.do_sample)] if self.drift_ways else []
        return [plain_way(self.do_sample), *others, *self.ways, *self.drift_ways]

    @property
    def num_steps(self) -> int:
        """Timed calls."""
        return len(self.all_ways) * len(self.batches) * self.repeats

    def run(
        self,
        decoder: Decoder,
        *,
        clock: Callable[[], float] = time.perf_counter,
        on_step: Callable[[Step], None] | None = None,
    ) -> dict[str, Any]:
        """Time all ways, compare exact greedy texts with plain decoding's, and read lossy ones with the target.

        Args:
            decoder: of the pair.
            clock: gives seconds.
            on_step: told of every timed call.

        Returns:
            "ways", "categories" and "drift", as `hf-speculate bench --json` writes them, and "left_out", the reason
            by the way's name. A way whose greedy text differs from plain decoding's for another reason than a near
            tie is left out: its speed says nothing.
        """
        measured = measure(
            self.all_ways,
            self.batches,
            decoder,
            repeats=self.repeats,
            seed=self.seed,
            clock=clock,
            on_step=on_step,
        )
        batches = {batch.number: batch for batch in self.batches}
        check = TextCheck(decoder.target)
        base = plain_of(self.all_ways, self.do_sample)
        plain = measured.runs[base.name]
        left_out = dict(measured.left_out)
        entries, categories = [way_entry(base, plain, plain, None)], []
        for way in self.ways:
            runs = measured.runs.get(way.name)
            if runs is None:
                continue
            checked = None
            if not self.do_sample and not way.is_lossy:
                compared = check(way, runs, plain, batches)
                checked = str(compared)
                if not compared.ok:
                    left_out[way.name] = f"its text is not plain decoding's: {checked}"
                    continue
            entries.append(way_entry(way, runs, plain, checked))
            categories += category_entries(way, runs, plain, batches)
        drift = self._drift(decoder, measured, batches)
        return {"ways": entries, "categories": categories, "drift": drift, "left_out": left_out}

    def _drift(self, decoder: Decoder, measured: Measured, batches: dict[int, Batch]) -> list[dict[str, Any]]:
        plain = measured.runs[plain_way(self.do_sample).name]
        read = [way for way in self.all_ways if way.engine == PLAIN or way in self.drift_ways]
        return [
            drift_entry(way, runs, plain, drift_of_runs(decoder.target, runs, batches))
            for way in (read if self.drift_ways else ())
            for runs in [measured.runs[way.name]]
        ]


def wrong_ways(left_out: Container[str], ways: Sequence[Way]) -> list[str]:
    """Names of our ways that were left out: their text is not plain decoding's.

    Args:
        left_out: names, of `Comparison.run`.
        ways: that were compared.
    """
    return [way.name for way in ways if way.engine == OURS and way.name in left_out]
