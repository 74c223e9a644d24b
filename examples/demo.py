"""Decode tasks with plain, assisted and speculative generation, and print the measurements.

    python examples/demo.py
    python examples/demo.py --tiny --prompts 16 --max-new-tokens 64 --num-assistant-tokens 5

The model is SmolLM2-135M-Instruct with its draft head. Assisted generation in transformers does not
support this head and drafts by prompt lookup. With --tiny, the model is the bundled 7 M pair, and
both libraries draft with the smaller model; one more line drafts with the EAGLE-3 head in
`examples/heads`.

SmolLM2 gets the ten tasks in `tasks.jsonl`. Seven of them copy text with changes, as editing does,
and suit prompt lookup. Three are plain questions. The two kinds are reported separately.

A pass decodes a single prompt, or several prompts of one kind together, with every method, in
alternating order. The script stops when the passes or the time are used up; a slow machine decodes
fewer prompts together. The table holds medians over passes. The speed-up is relative to plain
`generate()` in the same mode (greedy or sampling) on the same prompts in the same pass. A greedy
pass counts only if all methods generated the same text, because after a near-tie a method may
continue with a different text and different drafts. In float32, nearly all passes count.
transformers decodes a batch row by row. Ctrl-C prints the measurements so far; the exit status is
then 130.

Greedy texts are compared with plain decoding, at least one for each dtype, however short the time
is. The exit status is 1 if a text differs by more than rounding explains.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import hf_speculate
from demo_comparison import Comparison
from demo_decoding import (
    ASSISTED_K,
    OURS_GREEDY,
    PLAIN_GREEDY,
    Pair,
    Timing,
    as_pair,
    decode,
    encode,
    load_pair,
    methods,
)
from demo_report import Line, Tallies, Tally, print_summary, print_table, print_text
from hf_speculate.tools.bench.decoding import Batch
from models import PAIR, Question, load_models, read_by_category

EXAMPLES = Path(__file__).resolve().parent
BATCH_SIZES = (8, 4, 2)  # rows decoded together: the largest number that the time allows
MAX_ROWS_OF_MODEL = 4  # maximum number of rows for SmolLM2
MIN_PASSES = 3
WARM_UP_SHARE = 0.1  # maximum share of the time
MEASURING_SHARE = 0.8  # share of the time; the other dtype gets the rest
NUM_WARM_UP_TOKENS = 16  # number of new tokens per prompt
# Short plain runs between these passes reveal how busy the machine is.
PROBE_EVERY, PROBE_TOKENS = 3, 8
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FAILED, INTERRUPTED = 1, 130
BAR = "{desc} {percentage:3.0f}% |{bar:20}| {n_fmt} of at most {total_fmt} s{postfix}"


class Loaded(NamedTuple):
    """Models, tokenizer and prompts of a run."""

    title: str  # description of the models
    pairs: dict[str, Pair]  # by dtype
    tokenizer: PreTrainedTokenizerBase
    questions: list[Question]
    prompts: list[str]  # the questions in the model's format
    max_rows: int  # maximum number of rows decoded together
    is_sampled_too: bool  # whether to measure sampling as well


class Pass(NamedTuple):
    """Batch that the methods decode one after another."""

    kind: str
    batch_size: int
    batch: Batch


Loader = Callable[[argparse.Namespace], Loaded]


def run_line(
    line: Line, pair: Pair, batch: Batch, max_new_tokens: int, num_pass: int, tally: Tally
) -> None:
    """Decode one batch and add the call to `tally`."""
    reports: list[hf_speculate.RoundReport] = []
    callback = reports.append if replace(line, kind="") == OURS_GREEDY else None
    run = decode(line, pair, batch, max_new_tokens, num_pass, callback)
    tally.runs.append(run._replace(repeat=num_pass))
    tally.rounds.append([(report.num_accepted[0], report.num_emitted[0]) for report in reports])


def time_plain(pair: Pair, batch: Batch) -> Timing:
    """Time plain greedy decoding with two short runs; the first run also warms up."""
    seconds = [
        decode(PLAIN_GREEDY, pair, batch, num_tokens, seed=0).seconds for num_tokens in (2, 2, 12)
    ]
    token_s = max(seconds[2] - seconds[1], 0.0) / 10
    return Timing(max(seconds[1] - 2 * token_s, 0.0), token_s)


def passes_of(tokenizer: PreTrainedTokenizerBase, loaded: Loaded, num_rows: int) -> list[Pass]:
    """Return single prompts, interleaved with batches of `num_rows` prompts of one kind.

    Prompts repeat to fill the last batch of a kind.
    """
    singles = [
        Pass(question.kind, 1, batch)
        for question, batch in zip(
            loaded.questions, encode(tokenizer, loaded.prompts, 1), strict=True
        )
    ]
    batches = []
    for kind in dict.fromkeys(question.kind for question in loaded.questions):
        prompts = [
            prompt
            for question, prompt in zip(loaded.questions, loaded.prompts, strict=True)
            if question.kind == kind
        ]
        num_batches = -(-len(prompts) // num_rows)
        filled = list(islice(cycle(prompts), num_batches * num_rows))
        batches += [Pass(kind, num_rows, batch) for batch in encode(tokenizer, filled, num_rows)]
    passes, num_between = [], len(singles) // len(batches)
    for number, single in enumerate(singles, 1):
        passes.append(single)
        if batches and number % num_between == 0:
            passes.append(batches.pop(0))
    return passes + batches


def choose_methods(
    timing: Timing, loaded: Loaded, num_tokens: int, budget_s: float, has_head: bool
) -> list[Line]:
    """Return the methods with the largest number of rows that fits the time budget.

    There must be time for `MIN_PASSES` passes with each number of rows.
    """
    sizes = [min(size, len(loaded.prompts)) for size in BATCH_SIZES if size <= loaded.max_rows]
    choices = [methods(size, has_head, loaded.is_sampled_too) for size in sizes]
    fitting = [
        lines
        for lines in choices
        if MIN_PASSES * sum(timing.of_line(line, num_tokens) for line in lines) <= budget_s
    ]
    return (fitting or choices[-1:])[0]


def measure(
    tallies: Tallies,
    pair: Pair,
    passes: list[Pass],
    probes_s: list[float],
    args: argparse.Namespace,
    begin: float,
) -> None:
    """Cycle through the passes until `args.passes` or the time since `begin` is used up."""
    for line in tqdm(tallies, desc="warming up", leave=False):
        batch = next(
            candidate.batch for candidate in passes if candidate.batch_size == line.batch_size
        )
        ids, mask = (
            tensor[:, -NUM_WARM_UP_TOKENS:] for tensor in (batch.input_ids, batch.attention_mask)
        )
        decode(line, pair, batch._replace(input_ids=ids, attention_mask=mask), 4, seed=0)
        if time.perf_counter() - begin > WARM_UP_SHARE * args.budget_s:
            break
    budget_s = args.budget_s * MEASURING_SHARE
    with tqdm(total=round(budget_s), desc="decoding", bar_format=BAR) as bar:
        for index, (kind, batch_size, batch) in enumerate(islice(cycle(passes), args.passes)):
            if index % PROBE_EVERY == 0:
                probes_s.append(time_probe(pair, passes[0].batch))
            lines = [line for line in tallies if (line.kind, line.batch_size) == (kind, batch_size)]
            for line in lines if index % 2 == 0 else reversed(lines):
                bar.set_postfix_str(f"{line.batch_size} x {line.name}", refresh=False)
                elapsed_s = time.perf_counter() - begin
                bar.update(min(round(elapsed_s), bar.total) - bar.n)
                if elapsed_s > budget_s:
                    return
                run_line(line, pair, batch, args.max_new_tokens, index, tallies[line])


def time_probe(pair: Pair, batch: Batch) -> float:
    """Return how long a short run of plain decoding takes, in seconds."""
    return decode(PLAIN_GREEDY, pair, batch, PROBE_TOKENS, seed=0).seconds


def print_texts(
    tallies: Tallies, tokenizer: PreTrainedTokenizerBase, questions: list[Question]
) -> None:
    """Print the first texts of each kind, two in total."""
    kinds = list(dict.fromkeys(question.kind for question in questions))
    for kind in kinds:
        tally = tallies[replace(OURS_GREEDY, kind=kind)]
        if tally.rounds and kind == kinds[0]:
            print("\nGenerated text, with the drafted tokens that were accepted in green:")
        questions_of_kind = [question for question in questions if question.kind == kind]
        printed = list(zip(questions_of_kind, tally.runs, tally.rounds, strict=False))[
            : 2 // len(kinds)
        ]
        for question, run, rounds in printed:
            print(f"\n[{question.category}]" * bool(kind))
            print_text(tokenizer, question.text, run.texts[0], rounds)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="decode with the bundled 7 M pair")
    parser.add_argument(
        "--pair", type=Path, help="decode with the pair in this folder's target/ and draft/"
    )
    parser.add_argument(
        "--prompts-file",
        type=Path,
        help="default: prompts.jsonl for a pair, else tasks.jsonl; plain ones: questions.jsonl",
    )
    parser.add_argument("--prompts", type=int, default=10, help="how many prompts")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument(
        "--sampled",
        action=argparse.BooleanOptionalAction,
        help="measure sampling too; default: for a pair",
    )
    parser.add_argument(
        "--num-assistant-tokens",
        type=int,
        help="K, fixed for every engine; default: the default schedule, and "
        f"{ASSISTED_K} for transformers",
    )
    parser.add_argument(
        "--dtype", choices=list(DTYPES), default="float32", help="texts are equal in float32"
    )
    parser.add_argument("--passes", type=int, default=60)
    parser.add_argument("--budget-s", type=float, default=150.0, help="time for all decoding")
    return parser.parse_args(arguments)


def load(args: argparse.Namespace) -> Loaded:
    """Load the models, the tokenizer, and the prompts."""
    draft_len, folder = args.num_assistant_tokens, args.pair or PAIR
    if args.pair is None and not args.tiny:
        models = load_models(dtype=torch.float32)
        if not models.is_tiny:
            halved = load_models(dtype=torch.bfloat16)
            pairs = {"float32": as_pair(models, draft_len), "bfloat16": as_pair(halved, draft_len)}
            questions = read_by_category(
                args.prompts_file or EXAMPLES / "tasks.jsonl", args.prompts
            )
            drafting = "its draft head" if "drafter" in models.options else "prompt lookup"
            title = f"{models.name} with {drafting} (transformers: prompt lookup)"
            prompts = models.prompts([question.text for question in questions])
            return Loaded(
                title,
                pairs,
                models.tokenizer,
                questions,
                prompts,
                MAX_ROWS_OF_MODEL,
                bool(args.sampled),
            )
    if not (folder / "target").is_dir():
        raise SystemExit(
            f"{folder / 'target'} is missing; make it with examples/training/train_pair.py, or "
            "name another --pair"
        )
    pairs = {name: load_pair(folder, dtype, draft_len) for name, dtype in DTYPES.items()}
    questions = read_by_category(args.prompts_file or EXAMPLES / "prompts.jsonl", args.prompts)
    title = "the bundled 7 M pair" if folder == PAIR else f"the pair in {folder}"
    tokenizer, prompts = (
        AutoTokenizer.from_pretrained(folder / "target"),
        [question.text for question in questions],
    )
    return Loaded(
        title, pairs, tokenizer, questions, prompts, BATCH_SIZES[0], args.sampled is not False
    )


def run(args: argparse.Namespace, load: Loader) -> int:
    """Decode, print, and return the exit status."""
    loaded = load(args)
    pairs, tokenizer = loaded.pairs, loaded.tokenizer
    print(loaded.title, flush=True)
    begin = time.perf_counter()
    singles = encode(tokenizer, loaded.prompts, 1)
    dtype, pair = args.dtype, pairs[args.dtype]
    timing = time_plain(pair, singles[0])
    budget_s = args.budget_s * MEASURING_SHARE - (time.perf_counter() - begin)
    lines = choose_methods(timing, loaded, args.max_new_tokens, budget_s, pair.head is not None)
    num_rows = lines[-1].batch_size
    length = args.num_assistant_tokens or f"adaptive (transformers: {ASSISTED_K})"
    print(
        f"{len(singles)} prompts, 1 and {num_rows} at a time, {args.max_new_tokens} new tokens, K "
        f"= {length},"
    )
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{dtype}, {torch.get_num_threads()} threads, {versions}")
    kinds = dict.fromkeys(question.kind for question in loaded.questions)
    tallies = {replace(line, kind=kind): Tally() for kind in kinds for line in lines}
    probes_s: list[float] = []
    try:
        measure(tallies, pair, passes_of(tokenizer, loaded, num_rows), probes_s, args, begin)
    except KeyboardInterrupt:
        print_table(tallies, probes_s)
        raise
    print_texts(tallies, tokenizer, loaded.questions)
    is_reliable = print_table(tallies, probes_s)
    comparisons = {other: Comparison(pairs[other]) for other in (dtype, *(pairs.keys() - {dtype}))}
    comparisons[dtype].add_measured(tallies)
    for other, comparison in comparisons.items():
        end = begin if other == dtype else begin + args.budget_s
        comparison.add_until(end, singles, args.max_new_tokens)
        comparison.print(other)
    print_summary(tallies, is_reliable)
    return FAILED if any(comparison.is_failed for comparison in comparisons.values()) else 0


def main(arguments: Sequence[str] | None = None, load: Loader = load) -> int:
    args = parse_arguments(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        return run(args, load)
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
