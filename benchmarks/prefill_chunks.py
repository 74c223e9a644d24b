"""Measure how much a long prompt delays the other rows, by chunk size.

    python benchmarks/prefill_chunks.py

All rows but one decode short prompts with the bundled pair. Then a long prompt joins the batch and
is read in chunks between their rounds. For each neighbour, the script records the longest wait for
the next tokens while the long prompt is read, and the median wait without the long prompt. The
chunk sizes take turns in one process. The last size is that of the entire prompt.
"""

import argparse
import itertools
import time
from functools import partial
from statistics import median
from typing import Any

import torch
from _harness import Cells, Results, add_common_arguments, markdown, parse_common, spread
from _subjects import PAIR
from suffix import library_tokens
from transformers import AutoModelForCausalLM

from hf_speculate.options.refill.continuous import ContinuousDecoder
from hf_speculate.options.refill.row_prompts import RowPrompt

NAME = "prefill_chunks"
LONG = "long"  # key of the long prompt
NUM_ROUNDS_BEFORE = 4  # number of rounds before the long prompt arrives


class Waits:
    """Times between the tokens of a neighbour.

    They are recorded with and without a long prompt.
    """

    def __init__(self, long: RowPrompt, short: list[RowPrompt]):
        self._short, self._long, self._num_rounds = iter(short), [long], 0
        self._last, self._is_reading = 0.0, False
        self.before: list[float] = []
        self.during: list[float] = []
        self.long_s = 0.0  # from the arrival of the long prompt to its first token

    def source(self) -> RowPrompt | None:
        """Return the next short prompt or, after some rounds, the long prompt."""
        prompt = next(self._short, None)
        if prompt is None and self._long and self._num_rounds >= NUM_ROUNDS_BEFORE:
            self._is_reading, self._begin = True, time.perf_counter()
            return self._long.pop()
        return prompt

    def on_tokens(self, prompt: RowPrompt, token_ids: Any) -> bool:
        """Record when a neighbour gets tokens, or when the long prompt gets its first token."""
        now = time.perf_counter()
        if prompt.key == 0:
            self._num_rounds += 1
            if self._num_rounds > 1:
                (self.during if self._is_reading else self.before).append(now - self._last)
            self._last = now
        elif prompt.key == LONG and token_ids and self._is_reading:
            self._is_reading, self.long_s = False, now - self._begin
        return not (prompt.key == LONG and token_ids)


def measure(models: tuple[Any, Any], size: int, args: argparse.Namespace) -> Waits:
    """Measure the waits of one run."""
    target, draft = models
    ids = library_tokens(args.long + args.rows * args.short)
    chunk = {"prefill_chunk_size": size}
    long = RowPrompt(ids[: args.long], arguments={"max_new_tokens": 8, **chunk}, key=LONG)
    begins = range(args.long, args.long + (args.rows - 1) * args.short, args.short)
    arguments = {"max_new_tokens": args.max_new_tokens}
    short = [
        RowPrompt(ids[begin : begin + args.short], arguments=arguments, key=key)
        for key, begin in enumerate(begins)
    ]
    waits = Waits(long, short)
    options = {
        "assistant_model": draft,
        "num_assistant_tokens": args.num_draft_tokens,
        "do_sample": False,
    }
    decoder = ContinuousDecoder(
        target, args.rows, options | {"eos_token_id": None}, on_tokens=waits.on_tokens
    )
    for _ in decoder.decode(waits.source):
        pass
    return waits


def row(size: int, waits: list[Waits]) -> dict[str, Any]:
    """Return the figures for one chunk size."""
    return {
        "chunk_size": size,
        "longest_wait_s": spread([max(run.during) for run in waits]),
        "usual_wait_s": spread([median(run.before) for run in waits]),
        "first_token_s": spread([run.long_s for run in waits]),
    }


def table(results: dict[str, Any]) -> str:
    """Format the figures as a table."""
    milliseconds = lambda name: lambda row: f"{1000 * row[name]['median']:.0f}"  # noqa: E731
    columns = {
        "chunk": lambda row: row["chunk_size"],
        "longest wait of a neighbour, ms": milliseconds("longest_wait_s"),
        "wait without the prompt, ms": milliseconds("usual_wait_s"),
        "first token of the prompt, ms": milliseconds("first_token_s"),
    }
    return markdown(columns, results["rows"])


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=7, limit_s=900)
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--rows", type=int, default=8, help="rows decoded at once")
    parser.add_argument("--long", type=int, default=2000, help="tokens of the long prompt")
    parser.add_argument("--short", type=int, default=48, help="tokens of the other prompts")
    parser.add_argument("--max-new-tokens", type=int, default=192, help="of the other prompts")
    parser.add_argument("-k", "--num-draft-tokens", type=int, default=4)
    args = parse_common(parser)
    load = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    models = tuple(load(PAIR / name).to(args.device).eval() for name in ("target", "draft"))
    waits: dict[int, list[Waits]] = {size: [] for size in args.sizes}
    results = Results(NAME, args)
    for number, size in Cells(
        itertools.product(range(args.repeats + 1), waits), args.limit_s, NAME
    ):
        run = measure(models, size, args)
        if number:  # the first pass warms up
            waits[size].append(run)
        results.new = [row(size, runs) for size, runs in waits.items() if runs]
        results.write()
    print(table({"rows": results.rows}))


if __name__ == "__main__":
    main()
