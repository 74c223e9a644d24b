"""Measures methods against plain decoding, and says what each of them is worth."""

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

from hf_speculate.tools.bench.batches import Batch
from hf_speculate.tools.bench.decoding import Decoder
from hf_speculate.tools.bench.drift import drift_of_runs
from hf_speculate.tools.bench.equality import TextCheck
from hf_speculate.tools.bench.measuring import Measured, Step, measure, plain_of
from hf_speculate.tools.bench.methods import OURS, PLAIN, Method, plain_method
from hf_speculate.tools.bench.results import category_entries, drift_entry, method_entry


@dataclass(frozen=True)
class Comparison:
    """What is to be compared.

    Args:
        methods: beside plain decoding; all of them draw, or none does.
        drift_methods: lossy ones that are only looked at for speed and drift.
        batches: of prompts, at least one.
        do_sample: whether tokens are drawn.
        repeats: how often every batch is decoded by every method.
        seed: of what is drawn.
    """

    methods: Sequence[Method]
    drift_methods: Sequence[Method]
    batches: Sequence[Batch]
    do_sample: bool = False
    repeats: int = 1
    seed: int = 0

    @property
    def all_methods(self) -> list[Method]:
        """All that is timed: plain decoding first, of the other kind too where drift is looked at."""
        others = [plain_method(not self.do_sample)] if self.drift_methods else []
        return [plain_method(self.do_sample), *others, *self.methods, *self.drift_methods]

    @property
    def num_steps(self) -> int:
        """Timed calls."""
        return len(self.all_methods) * len(self.batches) * self.repeats

    def run(
        self,
        decoder: Decoder,
        *,
        clock: Callable[[], float] = time.perf_counter,
        on_step: Callable[[Step], None] | None = None,
    ) -> dict[str, Any]:
        """Time all methods, compare exact greedy texts with plain decoding's, and read lossy ones with the target.

        Args:
            decoder: of the pair.
            clock: gives seconds.
            on_step: told of every timed call.

        Returns:
            "methods", "categories" and "drift", as `hf-speculate bench --json` writes them, and "left_out", the reason
            by the method's name. A method is left out if its greedy text differs from plain decoding's for another
            reason than a near tie: its speed says nothing.
        """
        measured = measure(
            self.all_methods,
            self.batches,
            decoder,
            repeats=self.repeats,
            seed=self.seed,
            clock=clock,
            on_step=on_step,
        )
        batches = {batch.number: batch for batch in self.batches}
        check = TextCheck(decoder.target)
        base = plain_of(self.all_methods, self.do_sample)
        plain = measured.runs[base.name]
        left_out = dict(measured.left_out)
        entries, categories = [method_entry(base, plain, plain, None)], []
        for method in self.methods:
            runs = measured.runs.get(method.name)
            if runs is None:
                continue
            checked = None
            if not self.do_sample and not method.is_lossy:
                compared = check(method, runs, plain, batches)
                checked = str(compared)
                if not compared.ok:
                    left_out[method.name] = f"its text is not plain decoding's: {checked}"
                    continue
            entries.append(method_entry(method, runs, plain, checked))
            categories += category_entries(method, runs, plain, batches)
        drift = self._drift(decoder, measured, batches)
        return {"methods": entries, "categories": categories, "drift": drift, "left_out": left_out}

    def _drift(self, decoder: Decoder, measured: Measured, batches: dict[int, Batch]) -> list[dict[str, Any]]:
        plain = measured.runs[plain_method(self.do_sample).name]
        read = [method for method in self.all_methods if method.engine == PLAIN or method in self.drift_methods]
        return [
            drift_entry(method, runs, plain, drift_of_runs(decoder.target, runs, batches))
            for method in (read if self.drift_methods else ())
            for runs in [measured.runs[method.name]]
        ]


def wrong_methods(left_out: Container[str], methods: Sequence[Method]) -> list[str]:
    """Names of our methods that were left out: their text is not plain decoding's.

    Args:
        left_out: names, of `Comparison.run`.
        methods: that were compared.
    """
    return [method.name for method in methods if method.engine == OURS and method.name in left_out]
