"""Compares decoding methods with plain decoding: speed, equality of outputs and drift."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_speculate.tools.bench.batches import Batch
from hf_speculate.tools.bench.decoding import Decoder
from hf_speculate.tools.bench.drift import drift_of_runs
from hf_speculate.tools.bench.equality import TextCheck
from hf_speculate.tools.bench.measuring import Measured, Step, measure
from hf_speculate.tools.bench.methods import PLAIN, Method, plain_method
from hf_speculate.tools.bench.results import category_entries, doubts, draft_cost, drift_entry, method_entry

_SAMPLE_TOKENS = 120  # of the text that is shown for each method


@dataclass(frozen=True)
class Comparison:
    methods: Sequence[Method]  # besides plain decoding; all sample, or none does
    drift_methods: Sequence[Method]  # lossy ones, measured for speed and drift only
    batches: Sequence[Batch]  # of prompts, at least one
    do_sample: bool = False  # whether tokens are sampled
    repeats: int = 1  # how often each method decodes each batch
    seed: int = 0  # used for sampling

    @property
    def all_methods(self) -> list[Method]:
        """All timed methods, plain decoding first; for drift also plain decoding of the other kind."""
        others = [plain_method(not self.do_sample)] if self.drift_methods else []
        return [plain_method(self.do_sample), *others, *self.methods, *self.drift_methods]

    @property
    def num_steps(self) -> int:
        """Calls, warm-ups included."""
        return len(self.all_methods) * (1 + len(self.batches) * self.repeats)

    def run(self, decoder: Decoder, *, on_step: Callable[[Step], None] | None = None) -> dict[str, Any]:
        """Time all methods, compare greedy outputs with plain decoding's, and measure the drift of lossy ones.

        A method is left out if its greedy output differs from plain decoding's other than at near-ties. After Ctrl-C,
        outputs are not compared and drift is not measured.
        """
        measured = measure(
            self.all_methods, self.batches, decoder, repeats=self.repeats, seed=self.seed, on_step=on_step
        )
        check, cost = TextCheck(decoder), draft_cost(decoder.target, decoder.draft)
        base = self.all_methods[0]
        plain = measured.runs.get(base.name, [])
        left_out = dict(measured.left_out)
        entries, categories, is_interrupted = [], [], measured.is_interrupted
        for method in [base, *self.methods]:
            runs = measured.runs.get(method.name)
            if runs is None:
                continue
            checked = None
            if not (self.do_sample or method.is_lossy or method is base or is_interrupted):
                try:
                    compared = check(method, runs, plain)
                except KeyboardInterrupt:
                    is_interrupted = True
                else:
                    checked = str(compared)
                    if not compared.ok:
                        left_out[method.name] = f"its output differs from plain decoding's: {checked}"
                        continue
            sample = {"sample": _text(decoder, runs[0].texts[0][:_SAMPLE_TOKENS])}
            entries.append(method_entry(method, runs, plain, checked, cost) | sample)
            if method is not base:
                categories += category_entries(method, runs, plain)
        reasons = doubts(plain, self.repeats, sum(len(batch.rows) for batch in self.batches))
        return {
            "methods": entries,
            "categories": categories,
            "drift": [] if is_interrupted or not self.drift_methods else self._drift(decoder, measured),
            "reliability": {"is_reliable": not reasons, "reasons": reasons},
            "prompt": _text(decoder, self.batches[0].rows[0][-_SAMPLE_TOKENS:]),
            "is_interrupted": is_interrupted,
            "left_out": left_out,
        }

    def _drift(self, decoder: Decoder, measured: Measured) -> list[dict[str, Any]]:
        plain = measured.runs[self.all_methods[0].name]
        entries = []
        for method in self.all_methods:
            if method.engine == PLAIN or method in self.drift_methods:
                runs = measured.runs[method.name]
                entries.append(drift_entry(method, runs, plain, drift_of_runs(decoder.target, runs)))
        return entries


def _text(decoder: Decoder, token_ids: list[int] | Tensor) -> str | None:
    tokenizer = decoder.tokenizer
    return None if tokenizer is None else str(tokenizer.decode(token_ids, skip_special_tokens=True))
