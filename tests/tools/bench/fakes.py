"""Methods whose seconds and texts are made up, and pairs small enough to be saved in a test."""

from pathlib import Path

import torch
from transformers import GenerationConfig

from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.bench.batches import Batch
from hf_speculate.tools.bench.decoding import Decoded
from hf_speculate.tools.bench.drift import Drift
from hf_speculate.tools.bench.equality import Compared
from hf_speculate.tools.bench.tuning import Instruments
from tests.tiny import make_model, noisy_copy
from tests.tiny_tokenizers import byte_level_tokenizer

EOS = "<end>"


def save_pair(folder: Path, *, noise: float = 0.05, dtype: torch.dtype = torch.float64) -> tuple[str, str]:
    """A tiny target and a draft that is right most of the time, with a tokenizer of bytes."""
    tokenizer = byte_level_tokenizer([], eos_token=EOS, pad_token="<pad>")
    target = make_model("llama", vocab_size=len(tokenizer), dtype=dtype)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    target.generation_config = GenerationConfig(**ends, do_sample=False)
    models = {"target": target, "draft": noisy_copy(target, noise)}
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return str(folder / "target"), str(folder / "draft")


def empty_batches(num: int) -> list[Batch]:
    ids = torch.ones(1, 2, dtype=torch.int64)
    return [Batch(index, ids, torch.ones_like(ids)) for index in range(num)]


class FakeTimes:
    """Decodes nothing; a method takes the seconds that were written down for it, and so does the clock."""

    def __init__(self, seconds, texts=None, eos_token_ids=frozenset(), errors=None):
        self.seconds, self.texts, self.eos_token_ids, self.errors = seconds, texts or {}, eos_token_ids, errors or {}
        self.now, self.seeds = 0.0, []
        self.calls: list[tuple[str, int]] = []

    def clock(self) -> float:
        return self.now

    def __call__(self, method, batch, seed, max_new_tokens=None):
        if max_new_tokens is not None:  # a warm-up, which no clock sees
            return Decoded([torch.ones(1, dtype=torch.int64)], None)
        if (method.name, batch.number) in self.errors:
            raise self.errors[method.name, batch.number]
        self.calls.append((method.name, batch.number))
        self.seeds.append(seed)
        torch.manual_seed(seed)
        seconds = self.seconds[method.name]
        self.now += seconds[batch.number] if isinstance(seconds, list) else seconds
        ids = torch.tensor(self.texts.get(method.name, range(10)))
        stats = SpeculationStats() if method.engine == "ours" else None
        return Decoded([ids] * len(batch.input_ids), stats)


def instruments(times: FakeTimes, drifts=None, wrong=()) -> Instruments:
    """As a tuning takes them."""

    def check(method, runs, plain_runs):
        assert len(plain_runs) >= len(runs)
        return Compared(num_wrong=len(runs)) if method.name in wrong else Compared(num_equal=len(runs))

    def read(runs):
        return sum((drifts[run.texts[0][0]] for run in runs), Drift())

    return Instruments(times, check, read, times.clock)
