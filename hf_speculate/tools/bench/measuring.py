"""Times methods to decode that alternate, batch by batch."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.bench.batches import Batch
from hf_speculate.tools.bench.decoding import Decoded
from hf_speculate.tools.bench.methods import PLAIN, TRANSFORMERS, Method

_WARM_UP_TOKENS = 8
# What transformers' assisted generation is known to raise on pairs that it cannot serve.
_FOREIGN_ERRORS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


class Run(NamedTuple):
    """One timed call.

    Args:
        batch: number of what was decoded.
        repeat: which time.
        seconds: of the call.
        texts: new ids of every row, up to and with its end.
        stats: of ours; None for others.
    """

    batch: int
    repeat: int
    seconds: float
    texts: list[list[int]]
    stats: SpeculationStats | None

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(map(len, self.texts))

    @property
    def tokens_per_s(self) -> float:
        """New tokens of all rows a second."""
        return self.num_tokens / self.seconds


class Decode(Protocol):
    """As `Decoder`."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a row."""

    def __call__(self, method: Method, batch: Batch, seed: int, max_new_tokens: int | None = None) -> Decoded:
        """Decode a batch."""


class Step(NamedTuple):
    """What a progress bar is told after each timed call."""

    method: Method
    run: Run


Runs = dict[str, list[Run]]  # by the method's name


class Measured(NamedTuple):
    """What was timed, and why a method of transformers was not, each by the method's name."""

    runs: Runs
    left_out: dict[str, str]


def measure(
    methods: Sequence[Method],
    batches: Sequence[Batch],
    decode: Decode,
    *,
    repeats: int = 1,
    is_warm: bool = False,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    on_step: Callable[[Step], None] | None = None,
) -> Measured:
    """Decode every batch by every method, in turn, so that all meet the same machine.

    Every method decodes a few tokens of the first batch before anything is timed. torch's global generator is left as
    it was.

    Args:
        methods: of different names; those of transformers' assisted generation are left out where they raise.
        batches: at least one.
        decode: decodes a batch.
        repeats: how often each batch is decoded by each method.
        is_warm: whether no method needs its first tokens now.
        seed: of what is drawn; methods draw with the same one on the same batch.
        clock: gives seconds.
        on_step: told of every timed call.
    """
    runs: Runs = {method.name: [] for method in methods}
    left_out: dict[str, str] = {}
    order = list(methods)

    def attempt(method: Method, batch: Batch, num: int, max_new_tokens: int | None = None) -> Decoded | None:
        try:
            return decode(method, batch, seed + num, max_new_tokens)
        except _FOREIGN_ERRORS as error:
            if method.engine != TRANSFORMERS:
                raise
            first_line = next(iter(str(error).splitlines()), "")
            left_out[method.name] = f"{type(error).__name__}: {first_line}"
            order.remove(method)
            del runs[method.name]
            return None

    with torch.random.fork_rng(devices=_gpus(batches)):
        for method in () if is_warm else tuple(order):
            attempt(method, batches[0], 0, _WARM_UP_TOKENS)
        for repeat in range(repeats):
            for batch in batches:
                num = repeat * len(batches) + batch.number
                for method in tuple(order) if num % 2 == 0 else tuple(reversed(order)):
                    begin = clock()
                    decoded = attempt(method, batch, num)
                    seconds = clock() - begin
                    if decoded is None:
                        continue
                    texts = [_ended(ids.tolist(), decode.eos_token_ids) for ids in decoded.new_ids]
                    run = Run(batch.number, repeat, seconds, texts, decoded.stats)
                    runs[method.name].append(run)
                    if on_step is not None:
                        on_step(Step(method, run))
    return Measured(runs, left_out)


def plain_of(methods: Sequence[Method], do_sample: bool) -> Method:
    """The method without drafts that draws, or does not."""
    return next(method for method in methods if method.engine == PLAIN and method.do_sample == do_sample)


def ratios(runs: Sequence[Run], plain: Sequence[Run]) -> list[float]:
    """Tokens per second over plain decoding's on the same batch at the same time.

    Args:
        runs: of a method.
        plain: of plain decoding, on the same batches at least.
    """
    speeds = {(run.batch, run.repeat): run.tokens_per_s for run in plain}
    return [run.tokens_per_s / speeds[run.batch, run.repeat] for run in runs]


def _gpus(batches: Sequence[Batch]) -> list[torch.device]:
    """The CUDA devices whose generators are drawn from."""
    return list({batch.input_ids.device for batch in batches if batch.input_ids.device.type == "cuda"})


def _ended(ids: list[int], eos_token_ids: frozenset[int]) -> list[int]:
    """The ids up to and with the first that ends a row."""
    end = next((place for place, one in enumerate(ids) if one in eos_token_ids), len(ids))
    return ids[: end + 1]
