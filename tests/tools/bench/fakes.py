"""Provide methods with made-up times and texts."""

import torch

from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.bench.decoding import Batch, Run
from hf_speculate.tools.bench.quality import Compared, Drift
from hf_speculate.tools.bench.tuning import Instruments


def empty_batches(num: int) -> list[Batch]:
    ids = torch.ones(1, 2, dtype=torch.int64)
    return [Batch(index, ids, torch.ones_like(ids)) for index in range(num)]


class FakeTimes:
    """Decoder without a model; each method takes a given time."""

    def __init__(self, seconds, texts=None, errors=None):
        self.seconds, self.texts, self.errors = seconds, texts or {}, errors or {}
        self.seeds = []
        self.calls: list[tuple[str, int]] = []

    def __call__(self, method, batch, seed, max_new_tokens=None):
        if max_new_tokens is not None:  # a warm-up
            return Run(batch, 0, 1.0, [[1]], None)
        if (method.name, batch.number) in self.errors:
            raise self.errors[method.name, batch.number]
        self.calls.append((method.name, batch.number))
        self.seeds.append(seed)
        torch.manual_seed(seed)
        seconds = self.seconds[method.name]
        stats = SpeculationStats() if method.engine == "ours" else None
        texts = [list(self.texts.get(method.name, range(10)))] * len(batch.input_ids)
        return Run(
            batch, 0, seconds[batch.number] if isinstance(seconds, list) else seconds, texts, stats
        )


def instruments(times: FakeTimes, drifts=None, wrong=()) -> Instruments:
    """Return instruments for tuning."""

    def check(method, runs, plain_runs):
        assert len(plain_runs) >= len(runs)
        return (
            Compared(num_wrong=len(runs)) if method.name in wrong else Compared(num_equal=len(runs))
        )

    def read(runs):
        return sum((drifts[run.texts[0][0]] for run in runs), Drift())

    return Instruments(times, check, read)
