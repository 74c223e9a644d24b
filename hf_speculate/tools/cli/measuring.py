"""Parts of the commands that measure: prompts, progress and tables."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast

import rich.table
from rich.box import SIMPLE_HEAD
from rich.console import Console
from transformers.utils import logging

from hf_speculate.errors import ConfigError
from hf_speculate.tools.bench.batches import Batch, make_batches, take_in_turn
from hf_speculate.tools.bench.decoding import Decoder, Run
from hf_speculate.tools.bench.methods import Method
from hf_speculate.tools.bench.report.values import MISSING, Columns, Result, make_table
from hf_speculate.tools.bench.results import environment
from hf_speculate.tools.bench.tuning import TUNED_NAMES
from hf_speculate.tools.cli.arguments import Decoding, read_prompts
from hf_speculate.tools.cli.console import ProgressNotes, answer, note, notes, write_json
from hf_speculate.tools.cli.loading import load_pair
from hf_speculate.tools.cli.options import Measurement
from hf_speculate.tools.dataset.rows import token_ids_of

_PIPED_WIDTH = 160  # of tables without a terminal


def shared_fields(decoding: Decoding, options: Measurement) -> dict[str, Any]:
    """Fields of all methods of ours: those of `--set` and `--lookup`."""
    varied = sorted(set(decoding.fields) & TUNED_NAMES - {"posterior_alpha"})
    if varied:
        hint = "use --verifiers, --num-assistant-tokens and --thresholds"
        raise ConfigError(f"--set must leave out the fields in which methods differ, got {', '.join(varied)}; {hint}")
    fields = decoding.fields | ({} if options.lookup is None else {"prompt_lookup_num_tokens": options.lookup})
    if options.draft is None and fields.get("prompt_lookup_num_tokens") is None:
        raise ConfigError("there must be --draft or --lookup, got neither; name a draft model, or add --lookup 10")
    return fields


class Setup(NamedTuple):
    environment: dict[str, Any]  # versions, device, models and dtype, for JSON
    settings: dict[str, Any]  # arguments of `generate()` and the prompts, for JSON
    batches: list[Batch]  # of prompts, on the target's device
    decoder: Decoder


def load(options: Measurement, decoding: Decoding, fields: Mapping[str, Any]) -> Setup:
    """Read the prompts, then load the models."""
    prompts = read_prompts(options.prompts, text_as="lines")
    prompts = take_in_turn(prompts, [prompt.category for prompt in prompts], options.num_prompts)
    num_cut = sum(prompt.num_turns > 1 for prompt in prompts)
    if num_cut:
        note(f"{num_cut} of {len(prompts)} prompts have several turns; the first one is used")
    target, tokenizer, draft_arguments = load_pair(options)
    token_ids = [token_ids_of(prompt, tokenizer, is_chat=options.chat) for prompt in prompts]
    categories, pad_token_id = [prompt.category for prompt in prompts], cast(int, tokenizer.pad_token_id)
    batches = make_batches(token_ids, categories, pad_token_id, options.batch_size, target.device)
    dtype = str(target.dtype).removeprefix("torch.")
    where = {**environment(target.device), "dtype": dtype, "target": options.target, "draft": options.draft}
    logging.set_verbosity_error()  # warnings would break the progress bar
    decoder = Decoder(target, draft_arguments, decoding.plain)
    given = {"batch_size": options.batch_size, "prompts": str(options.prompts), "fields": dict(fields)}
    return Setup(where, decoding.plain | given, batches, decoder)


@contextmanager
def progress(num_steps: int, log: Console | None = None) -> Iterator[Callable[[Method, Run | None], None]]:
    """Show at most `num_steps` calls; yields a function to call after each."""
    log = log or notes()
    steps, bar = itertools.count(1), ProgressNotes(log, "warming up")

    def on_step(method: Method, run: Run | None) -> None:
        num_done = next(steps)
        name, numbers = f"warming up: {method.name}", ""
        if run is not None:
            name, numbers = method.name, f"{run.tokens_per_s:.0f} tokens/s"
            if run.stats is not None:
                numbers += f", {run.stats.acceptance_rate:.0%} accepted"
        if log.is_terminal and num_done >= num_steps:
            numbers += "; comparing outputs"  # takes time, but no calls
        bar.show(num_done, num_steps, name, numbers)

    with bar.bar:
        yield on_step


def show(title: str, columns: Columns, entries: Sequence[Result], num_names: int) -> None:
    """Print a table, if there are entries; columns of numbers are aligned on the right."""
    table = make_table(title, "", columns, entries, num_names)
    if table is None:
        return
    shown = rich.table.Table(title=table.title, caption=table.note, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.title_justify, shown.title_style, shown.caption_justify = "left", "bold", "left"
    for index, (head, column) in enumerate(zip(table.head, zip(*table.lines, strict=True), strict=True)):
        is_number = all(cell == MISSING or cell.lstrip("-")[:1].isdigit() for cell in column)
        justify: Literal["left", "right"] = "right" if is_number and index >= table.num_names else "left"
        shown.add_column(head, justify=justify, overflow="fold", no_wrap=index == 0)
    for line in table.lines:
        shown.add_row(*line)
    output = Console(highlight=False, markup=False)
    if not output.is_terminal:
        output.width = _PIPED_WIDTH
    output.print(shown)


def finish(result: dict[str, Any], options: Measurement) -> None:
    """Print why results are not reliable or not complete, then write them as JSON."""
    for reason in result["reliability"]["reasons"]:
        note(f"warning: {reason}", style="bold yellow")
    if result["is_interrupted"]:
        note("interrupted: the results cover the calls so far", style="bold")
    if options.as_json:
        answer(json.dumps(result, indent=1))
    if options.output is not None:
        write_json(options.output, result)
