"""What the commands that measure share: their options, their prompts, their progress and their tables."""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers.utils import logging

from hf_speculate.errors import ConfigError
from hf_speculate.tools.bench.batches import Batch, make_batches, take_in_turn
from hf_speculate.tools.bench.decoding import Decoder
from hf_speculate.tools.bench.measuring import Step
from hf_speculate.tools.bench.results import environment
from hf_speculate.tools.bench.saving import TUNED_NAMES
from hf_speculate.tools.cli import options
from hf_speculate.tools.cli.loading import Pair
from hf_speculate.tools.cli.prompts import read_prompts
from hf_speculate.tools.dataset.encoding import token_ids_of

DraftModel = Annotated[str, typer.Argument(help="Name or path of the draft model.")]
Prompts = Annotated[Path, typer.Argument(help="One prompt a line: .jsonl, Spec-Bench's question.jsonl too, or a text.")]
NumPrompts = Annotated[
    int | None, typer.Option("--num-prompts", min=1, help="Prompts at most, of each category in turn; unset: all.")
]
BatchSize = Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Rows that are decoded together.")]
Chat = Annotated[bool, typer.Option("--chat", help="Put prompts through the tokenizer's chat template.")]
DraftLens = Annotated[
    str, typer.Option("--num-assistant-tokens", "-k", help="Tokens a round, between commas: 5, adaptive, adaptive:16.")
]
Thresholds = Annotated[
    str, typer.Option("--thresholds", help="Values of posterior_threshold for lossy verifiers, between commas.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Write all figures into this file.")]
_FIGURE = re.compile(r"-?\d[\d.]*( \(|%?$)|-$")
_PIPED_WIDTH = 160  # of tables that no terminal shows


def shared_fields(settings: Sequence[str] | None) -> dict[str, Any]:
    """Fields of `--set` for all methods of ours.

    Raises:
        ConfigError: see `fields_from`; or a field is one in which the methods differ.
    """
    fields = options.fields_from(None, None, None, None, settings)
    varied = sorted(set(fields) & set(TUNED_NAMES) - {"posterior_alpha"})
    if varied:
        raise ConfigError(
            f"--set must leave out what the methods differ in, got {', '.join(varied)}; "
            "use --verifiers, --num-assistant-tokens and --thresholds"
        )
    return fields


def encode(path: Path, pair: Pair, batch_size: int, num: int | None, chat: bool, log: Console) -> list[Batch]:
    """The prompts of a file as batches on the target's device.

    Args:
        path: of the file.
        pair: whose target reads them.
        batch_size: rows of a batch at most.
        num: prompts at most; None: all.
        chat: whether texts are a chat's.
        log: is told where only a prompt's first turn is taken.

    Raises:
        ConfigError: see `read_prompts` and `token_ids_of`.
    """
    prompts = read_prompts(path, by_line=True)
    prompts = take_in_turn(prompts, [prompt.category for prompt in prompts], num)
    num_cut = sum(prompt.num_turns > 1 for prompt in prompts)
    if num_cut:
        log.print(f"{num_cut} of {len(prompts)} prompts have several turns: the first is taken", style="dim")
    token_ids = token_ids_of(prompts, pair.tokenizer, is_chat=chat)
    categories = [prompt.category for prompt in prompts]
    return make_batches(token_ids, categories, pair.tokenizer.pad_token_id, batch_size, pair.target.device)


def environment_of(pair: Pair, target: str, draft: str) -> dict[str, Any]:
    """Environment of a measurement: versions, device, models and dtype."""
    dtype = str(pair.target.dtype).removeprefix("torch.")
    return {**environment(pair.target.device), "dtype": dtype, "target": target, "draft": draft}


def decoder_of(pair: Pair, decoding: dict[str, Any]) -> Decoder:
    """Decodes with a pair.

    Args:
        pair: with a draft.
        decoding: of `decoding_from`.
    """
    logging.set_verbosity_error()  # its warnings would tear the progress bar
    sampling = {name: value for name, value in decoding.items() if name not in ("max_new_tokens", "do_sample")}
    return Decoder(pair.target, pair.arguments, max_new_tokens=decoding["max_new_tokens"], sampling=sampling)


@contextmanager
def progress(log: Console, num_steps: int) -> Iterator[Callable[[Step], None]]:
    """Show a bar while methods are timed; what is given is to be called after every timed call.

    Args:
        log: where the bar is drawn, if it is a terminal.
        num_steps: timed calls at most.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=log, transient=True, disable=not log.is_terminal) as bar:
        task = bar.add_task("warming up", total=num_steps, figures="")

        def on_step(step: Step) -> None:
            if step.run is None:
                bar.update(task, advance=1, description=f"warming up: {step.method.name}")
                return
            figures = f"{step.run.tokens_per_s:.0f} tokens/s"
            if step.run.stats is not None:
                figures += f", {step.run.stats.acceptance_rate:.0%} accepted"
            if bar.tasks[0].completed + 1 >= num_steps:
                figures += "; comparing texts"  # which takes forwards of the target, and has no steps
            bar.update(task, advance=1, description=step.method.name, figures=figures)

        yield on_step


def show(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table to the standard output.

    Args:
        title: above it.
        heads: of the columns; figures are on the right.
        rows: cells as they are shown.
    """
    table = Table(title=title, title_justify="left")
    for number, head in enumerate(heads):
        is_figure = all(_FIGURE.match(cells[number]) for cells in rows)
        justify: Literal["left", "right"] = "right" if is_figure else "left"
        table.add_column(head, justify=justify, overflow="fold", no_wrap=number == 0)
    for cells in rows:
        table.add_row(*cells)
    output = Console(highlight=False, markup=False)
    if not output.is_terminal:
        output.width = _PIPED_WIDTH
    output.print(table)


def shown(value: Any, form: str = ".2f") -> str:
    """A figure as text: a spread with its ends, and a dash for what is not known.

    Args:
        value: number, spread or None.
        form: of numbers.
    """
    if value is None:
        return "-"
    if isinstance(value, dict):
        return f"{value['median']:{form}} ({value['min']:{form}} to {value['max']:{form}})"
    return f"{value:{form}}"


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a result, at once.

    Args:
        path: replaced where it is there.
        result: plain values.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def check_folder_of(path: Path | None) -> None:
    """Make sure before anything is measured that a file can be written.

    Raises:
        ConfigError: there is no such folder, or a folder in the file's place.
    """
    if path is not None and path.is_dir():
        raise ConfigError(f"results must go into a file, got the folder {path}; name a file in it")
    if path is not None and not path.resolve().parent.is_dir():
        raise ConfigError(f"the folder of {path} must exist, got none; make it first, or name another file")
