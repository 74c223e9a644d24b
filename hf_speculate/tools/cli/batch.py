"""`hf-speculate batch`: decode a file of prompts into a file of texts."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hf_speculate.errors import ConfigError
from hf_speculate.tools.cli import options
from hf_speculate.tools.cli.console import notes
from hf_speculate.tools.cli.loading import check_placement, load_pair, load_tokenizer
from hf_speculate.tools.dataset.decode import check_batch_size
from hf_speculate.tools.dataset.encoding import batches_of
from hf_speculate.tools.dataset.on_ray import RayOptions, on_ray
from hf_speculate.tools.dataset.ranks import find_ranks
from hf_speculate.tools.dataset.row_decoder import RowDecoder
from hf_speculate.tools.dataset.rows import Row, read_rows
from hf_speculate.tools.dataset.run import DatasetReport, Job, in_this_process, run

_LINE_EVERY_S = 60.0


def batch(
    prompts: Annotated[Path, typer.Argument(help="A JSON value a line: a string, or an object with a prompt.")],
    output: Annotated[Path, typer.Argument(help="Gets a JSON object a line; is gone on with where it exists.")],
    target: Annotated[str, typer.Option("--target", help="Name or path of the model that decodes.")],
    draft: options.Draft = None,
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", help="Prompts that are decoded together.")] = 16,
    chat: Annotated[bool, typer.Option("--chat", help="Put texts through the tokenizer's chat template too.")] = False,
    ordered: Annotated[bool, typer.Option("--ordered", help="Sort the finished output as the prompts are.")] = False,
    if_changed: Annotated[
        Literal["refuse", "keep", "restart"],
        typer.Option("--if-changed", help="Finished rows where prompts or settings have changed since."),
    ] = "refuse",
    lookup: options.Lookup = None,
    verifier: options.Verifier = None,
    num_assistant_tokens: options.NumAssistantTokens = None,
    max_new_tokens: options.MaxNewTokens = 256,
    sample: options.Sample = False,
    temperature: options.Temperature = None,
    seed: options.Seed = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    settings: options.Settings = None,
    engine: Annotated[
        Literal["local", "ray"], typer.Option("--engine", help="This process, or actors of Ray Data.")
    ] = "local",
    workers: Annotated[int | None, typer.Option("--workers", help="Actors; unset: one a GPU, or one.")] = None,
    cpus_per_worker: Annotated[
        float | None, typer.Option("--cpus-per-worker", help="CPUs of an actor without a GPU; unset: 1.")
    ] = None,
    gpus_per_worker: Annotated[
        float | None, typer.Option("--gpus-per-worker", help="GPUs of an actor; unset: 1 where there are any.")
    ] = None,
    ray_address: Annotated[str | None, typer.Option("--ray-address", help="Of a running cluster.")] = None,
) -> None:
    """Decode a file of prompts, going on where an earlier run was ended.

    `accelerate launch` and `torchrun` split the prompts over their processes.
    """
    fields = options.fields_from(lookup, verifier, num_assistant_tokens, seed, settings)
    own_seed = _seed(fields.pop("seed", None))
    arguments = options.decoding_from(max_new_tokens, sample, temperature) | fields
    check_batch_size(batch_size)
    ray_given = {
        "--workers": workers,
        "--cpus-per-worker": cpus_per_worker,
        "--gpus-per-worker": gpus_per_worker,
        "--ray-address": ray_address,
    }
    if engine == "local":
        _check_without_ray(ray_given)
        check_placement(dtype, device)  # Ray's actors look at their own machines
    ray_options = RayOptions(workers, 1.0 if cpus_per_worker is None else cpus_per_worker, gpus_per_worker, ray_address)
    rows = read_rows(prompts)
    _check_paths(prompts, output)
    ranks = find_ranks(is_cpu=True if device == "cpu" else None)
    if engine == "ray" and ranks.num > 1:
        raise ConfigError(
            f"--engine ray must be started once, got {ranks.num} ranks; leave the launcher out, Ray has its own workers"
        )
    if ranks.device is not None and device == "auto":
        device = ranks.device
    given = {"target": target, "draft": draft, "dtype": dtype, "chat": chat, **arguments}
    job = Job(rows, output, given, own_seed, ordered, if_changed)
    log = notes()
    load = partial(make_decoder, target, draft, dtype, device, arguments, chat)
    decode = on_ray(load, ray_options) if engine == "ray" else in_this_process(load)

    progress = _Progress(log)

    def make_batches(left: Sequence[Row]) -> list[list[Row]]:
        tokenizer = load_tokenizer(target)
        if ranks.is_main:
            progress.start()
        batches = batches_of(left, batch_size, tokenizer, chat)
        progress.load()
        return batches

    try:
        report = run(job, make_batches, decode, ranks, progress.show if ranks.is_main else None)
    finally:
        progress.stop()
    if ranks.is_main:
        log.print(_line(report), style="dim", soft_wrap=True)
    ranks.close()


def make_decoder(
    target: str, draft: str | None, dtype: str, device: str, arguments: dict[str, Any], is_chat: bool
) -> RowDecoder:
    """Load what decodes, here or in an actor."""
    pair = load_pair(target, draft, dtype, device)
    rest = {name: value for name, value in arguments.items() if name != "max_new_tokens"}
    return RowDecoder(pair.target, pair.tokenizer, arguments["max_new_tokens"], pair.arguments | rest, is_chat)


def _seed(seed: Any) -> int | None:
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ConfigError(f"seed must be one whole number, got {seed!r}; each row gets its own from it and from its id")
    return seed


def _check_without_ray(given: Mapping[str, Any]) -> None:
    """Refuse options that nothing would follow."""
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise ConfigError(f"{names[0]} must come with --engine ray, got --engine local; add --engine ray")


def _check_paths(prompts: Path, output: Path) -> None:
    if output.exists() and output.samefile(prompts):
        raise ConfigError(f"the output must not be the file of prompts, got {output} twice; choose another output")


class _Progress:
    """A bar of rows on a terminal, with tokens a second and acceptance; elsewhere a line a minute.

    Args:
        log: where it is shown.
        clock: seconds.
    """

    def __init__(self, log: Console, clock: Callable[[], float] = time.monotonic):
        self.log, self.clock = log, clock
        self.bar = Progress(
            BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn(), console=log
        )
        self.task = self.bar.add_task("reading prompts", total=None)
        self.shown_s = clock()

    def start(self) -> None:
        """Show that something goes on."""
        if self.log.is_terminal:
            self.bar.start()

    def load(self) -> None:
        """Say that prompts are read and models are next."""
        self.bar.update(self.task, description="loading")

    def show(self, report: DatasetReport) -> None:
        """Show how far this process is."""
        self.bar.update(self.task, total=report.num_rows, completed=report.num_finished, description=_speed(report))
        if not self.log.is_terminal and self.clock() - self.shown_s >= _LINE_EVERY_S:
            self.shown_s = self.clock()
            self.log.print(
                f"{report.num_finished} of {report.num_rows} rows, {_speed(report)}", style="dim", soft_wrap=True
            )

    def stop(self) -> None:
        """Leave the bar as it is."""
        if self.log.is_terminal:
            self.bar.stop()


def _speed(report: DatasetReport) -> str:
    speed = f"{report.tokens_per_s:.1f} tokens a second"
    return f"{speed}, {report.acceptance_rate:.0%} of the drafts accepted" if report.num_drafted else speed


def _line(report: DatasetReport) -> str:
    before = f", {report.num_resumed} of them before this run" if report.num_resumed else ""
    line = f"{report.num_rows} rows in {report.path}{before}"
    if not report.num_tokens:
        return line
    return f"{line}; {report.num_tokens} tokens in {report.seconds:.1f} s, {_speed(report)}"
