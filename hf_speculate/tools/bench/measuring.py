"""Times decoding methods that alternate, batch by batch."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hf_speculate.tools.bench.decoding import Batch, Decoder, Run
from hf_speculate.tools.bench.methods import PLAIN, TRANSFORMERS, Method

_WARM_UP_TOKENS = 8
# Raised by transformers' assisted generation for pairs that it does not support.
_ASSISTED_ERRORS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


Runs = dict[str, list[Run]]  # by name of the method
OnStep = Callable[[Method, Run | None], object]  # is called after each call; the run is None for a warm-up


class Measured(NamedTuple):
    """Timed calls, and the reasons for methods of transformers that failed, by name of the method."""

    runs: Runs
    left_out: dict[str, str]
    is_interrupted: bool = False


def measure(
    methods: Sequence[Method],
    batches: Sequence[Batch],
    decode: Decoder,
    *,
    repeats: int = 1,
    is_warm: bool = False,
    seed: int = 0,
    on_step: OnStep = lambda method, run: None,
) -> Measured:
    """Decode each batch with each method in turn, so that all methods meet the same load of the machine.

    Unless `is_warm`, every method first decodes a few tokens untimed. Ctrl-C returns the calls so far.
    """
    runs: Runs = {method.name: [] for method in methods}
    left_out: dict[str, str] = {}

    def attempt(method: Method, batch: Batch, num: int, max_new_tokens: int | None = None) -> Run | None:
        if method.name in left_out:
            return None
        try:
            return decode(method, batch, seed + num, max_new_tokens)
        except _ASSISTED_ERRORS as error:
            if method.engine != TRANSFORMERS:
                raise
            first_line = str(error).partition("\n")[0]
            left_out[method.name] = f"{type(error).__name__}: {first_line}"
            del runs[method.name]
            return None

    devices = {batch.input_ids.device for batch in batches if batch.input_ids.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            for method in () if is_warm else methods:
                attempt(method, batches[0], 0, _WARM_UP_TOKENS)
                on_step(method, None)
            for repeat, batch in itertools.product(range(repeats), batches):
                num = repeat * len(batches) + batch.number
                for method in methods if num % 2 == 0 else reversed(methods):
                    if (run := attempt(method, batch, num)) is not None:
                        runs[method.name].append(run._replace(repeat=repeat))
                        on_step(method, run)
        except KeyboardInterrupt:
            return Measured(_comparable(runs, methods), left_out, is_interrupted=True)
    return Measured(runs, left_out)


def ratios(runs: Sequence[Run], plain: Sequence[Run]) -> list[float]:
    """Tokens per second over plain decoding's on the same batch and repetition."""
    speeds = {run.key: run.tokens_per_s for run in plain}
    return [run.tokens_per_s / speeds[run.key] for run in runs]


def _comparable(runs: Runs, methods: Sequence[Method]) -> Runs:
    """Calls on batches that all plain methods have decoded; methods without any are left out."""
    plain = [{run.key for run in runs[one.name]} for one in methods if one.engine == PLAIN]
    done = set.intersection(*plain) if plain else set()
    kept = {name: [run for run in of_it if run.key in done] for name, of_it in runs.items()}
    return {name: of_it for name, of_it in kept.items() if of_it}
