"""Parts of the commands that measure: prompts, progress and tables."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
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
from hf_speculate.tools.cli.arguments import Decoding
from hf_speculate.tools.cli.console import answer, write_json
from hf_speculate.tools.cli.loading import Pair
from hf_speculate.tools.cli.options import Grid, Models, PromptSet
from hf_speculate.tools.cli.prompts import read_prompts
from hf_speculate.tools.dataset.encoding import token_ids_of
from hf_speculate.tools.dataset.rows import Row

_NUMBER = re.compile(r"-?\d[\d.]*( \(|%?$)|-$")
_PIPED_WIDTH = 160  # of tables without a terminal


def shared_fields(decoding: Decoding, models: Models, grid: Grid) -> dict[str, Any]:
    """Fields of all methods of ours: those of `--set` and `--lookup`."""
    varied = sorted(set(decoding.fields) & set(TUNED_NAMES) - {"posterior_alpha"})
    if varied:
        raise ConfigError(
            f"--set must leave out the fields in which methods differ, got {', '.join(varied)}; "
            "use --verifiers, --num-assistant-tokens and --thresholds"
        )
    fields = decoding.fields | ({} if grid.lookup is None else {"prompt_lookup_num_tokens": grid.lookup})
    if models.draft is None and fields.get("prompt_lookup_num_tokens") is None:
        raise ConfigError("there must be --draft or --lookup, got neither; name a draft model, or add --lookup 10")
    return fields


def prompts_of(prompt_set: PromptSet, log: Console) -> list[Row]:
    """The prompts of a measurement."""
    prompts = read_prompts(prompt_set.prompts, by_line=True)
    prompts = take_in_turn(prompts, [prompt.category for prompt in prompts], prompt_set.num_prompts)
    num_cut = sum(prompt.num_turns > 1 for prompt in prompts)
    if num_cut:
        log.print(f"{num_cut} of {len(prompts)} prompts have several turns; the first one is used", style="dim")
    return prompts


def encode(prompts: list[Row], prompt_set: PromptSet, pair: Pair) -> list[Batch]:
    """Batches of the prompts on the target's device."""
    token_ids = token_ids_of(prompts, pair.tokenizer, is_chat=prompt_set.chat)
    categories = [prompt.category for prompt in prompts]
    pad_token_id: Any = pair.tokenizer.pad_token_id
    return make_batches(token_ids, categories, pad_token_id, prompt_set.batch_size, pair.target.device)


def environment_of(pair: Pair, models: Models) -> dict[str, Any]:
    """Versions, device, models and dtype of a measurement."""
    dtype = str(pair.target.dtype).removeprefix("torch.")
    return {**environment(pair.target.device), "dtype": dtype, "target": models.target, "draft": models.draft}


def settings_of(decoding: Decoding, prompt_set: PromptSet, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a measurement, for JSON."""
    own = {"max_new_tokens": decoding.max_new_tokens, "do_sample": decoding.do_sample}
    own |= decoding.sampling | decoding.options
    return {**own, "batch_size": prompt_set.batch_size, "prompts": str(prompt_set.prompts), "fields": dict(fields)}


def decoder_of(pair: Pair, decoding: Decoding) -> Decoder:
    """A decoder of the pair."""
    logging.set_verbosity_error()  # warnings would break the progress bar
    return Decoder(
        pair.target,
        pair.arguments,
        max_new_tokens=decoding.max_new_tokens,
        sampling=decoding.sampling,
        options=decoding.options,
    )


@contextmanager
def progress(log: Console, num_steps: int) -> Iterator[Callable[[Step], None]]:
    """Show at most `num_steps` calls as a bar on a terminal, else as lines; yields a function to call after each."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=log, transient=True, disable=not log.is_terminal) as bar:
        task = bar.add_task("warming up", total=num_steps, numbers="")
        num_done = 0

        def on_step(step: Step) -> None:
            nonlocal num_done
            num_done += 1
            name, numbers = f"warming up: {step.method.name}", ""
            if step.run is not None:
                name, numbers = step.method.name, f"{step.run.tokens_per_s:.0f} tokens/s"
                if step.run.stats is not None:
                    numbers += f", {step.run.stats.acceptance_rate:.0%} accepted"
            if log.is_terminal:
                ending = "; comparing outputs" if num_done >= num_steps else ""  # takes time, but no calls
                bar.update(task, advance=1, description=name, numbers=numbers + ending)
            else:
                line = f"{num_done}/{num_steps} {name} {numbers}".rstrip()
                log.print(line, style="dim", markup=False, soft_wrap=True)

        yield on_step


def show(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table without empty columns; columns of numbers are aligned on the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    kept = [index for index in range(len(heads)) if any(cells[index] != "-" for cells in rows)]
    for index in kept:
        is_number = all(_NUMBER.match(cells[index]) for cells in rows)
        justify: Literal["left", "right"] = "right" if is_number else "left"
        table.add_column(heads[index], justify=justify, overflow="fold", no_wrap=index == 0)
    for cells in rows:
        table.add_row(*(cells[index] for index in kept))
    output = Console(highlight=False, markup=False)
    if not output.is_terminal:
        output.width = _PIPED_WIDTH
    output.print(table)


def shown(value: Any, form: str = ".2f") -> str:
    """A number as text, a spread with minimum and maximum, None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, dict):
        return f"{value['median']:{form}} ({value['min']:{form}}-{value['max']:{form}})"
    return f"{value:{form}}"


def show_doubts(result: Mapping[str, Any], log: Console) -> None:
    """Print why a measurement is not reliable, and that it was interrupted."""
    for reason in result["reliability"]["reasons"]:
        log.print(f"warning: {reason}", style="bold yellow", markup=False, soft_wrap=True)
    if result["is_interrupted"]:
        log.print("interrupted: the results cover the calls so far", style="bold", soft_wrap=True)


def write_results(result: dict[str, Any], as_json: bool, output: Path | None) -> None:
    """Print the results as JSON, and write them to a file."""
    if as_json:
        answer(json.dumps(result, indent=1))
    if output is not None:
        write_json(output, result)
