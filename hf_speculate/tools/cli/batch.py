"""`hf-speculate batch`: decode a file of prompts into a file of results."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any

from hf_speculate.errors import ConfigError, counted
from hf_speculate.tools.cli.arguments import arguments_of, read_prompts
from hf_speculate.tools.cli.console import INTERRUPTED, OK, ProgressNotes, note, notes
from hf_speculate.tools.cli.loading import (
    check_device,
    load_pair,
    load_tokenizer,
    with_named_target,
)
from hf_speculate.tools.cli.options import Batch, Models, Ray
from hf_speculate.tools.cli.store import lookup_of, open_store
from hf_speculate.tools.dataset.decode import DatasetReport, decode_job
from hf_speculate.tools.dataset.files import Job
from hf_speculate.tools.dataset.on_ray import decode_on_ray
from hf_speculate.tools.dataset.ranks import find_ranks
from hf_speculate.tools.dataset.row_decoder import Decoded, OnBegin, RowDecoder
from hf_speculate.tools.dataset.rows import Row, batches_of, check_settings

_LINE_EVERY_S = 60.0


def run(options: Batch) -> int:
    arguments, output, is_on_ray = (
        lookup_of(options) | arguments_of(options),
        options.output,
        options.engine == "ray",
    )
    seed = arguments.pop("seed", None)
    on_ray_with = {
        field.name: value
        for field in fields(Ray)
        if (value := getattr(options, field.name)) is not None
    }
    if not is_on_ray:
        if on_ray_with:
            name = min(on_ray_with).replace("_", "-")
            raise ConfigError(
                f"--{name} must come with --engine ray, got --engine local; add --engine ray"
            )
        check_device(options.device)  # with Ray, actors check the devices of their own machines
    elif options.store is not None:
        raise ConfigError(
            "--store must come with --engine local, got --engine ray; leave one of them out"
        )
    rows = read_prompts(options.prompts, text_as=None, table=options)
    check_settings(rows, options.sample, "add --sample")
    if output.exists() and options.prompts.exists() and output.samefile(options.prompts):
        raise ConfigError(
            f"the output must not be the file of prompts, got {output} twice; choose another output"
        )
    options = with_named_target(options)
    identity = {
        name: getattr(options, name) for name in ("target", "draft", "dtype", "chat")
    } | arguments
    job = Job(rows, output, identity, seed, options.ordered, options.if_changed)
    ranks = find_ranks(is_cpu=options.device == "cpu")
    if is_on_ray and ranks.num > 1:
        raise ConfigError(
            f"--engine ray must be started once, got {ranks.num} ranks; leave the launcher out, "
            "Ray has its own workers"
        )
    if ranks.state is not None and options.device == "auto":
        options = replace(options, device=str(ranks.state.device))
    stored: dict[str, Any] = {}  # arguments of `generate()` that are not recorded in the manifest
    progress = ProgressNotes(notes(), "loading", _LINE_EVERY_S)

    def make_batches(rows: Sequence[Row]) -> list[list[Row]]:
        return batches_of(rows, options.rows, load_tokenizer(options), options.chat)

    def engine(batches: Sequence[Sequence[Row]], seed: int, on_begin: OnBegin) -> Iterator[Decoded]:
        load = partial(make_decoder, options, arguments | stored, options.chat)
        if is_on_ray:
            return decode_on_ray(load, batches, seed, **on_ray_with)
        return load().decode_all(
            batches, seed, on_begin, 0 if options.static_batches else options.rows
        )

    def show(report: DatasetReport) -> None:
        if ranks.is_main:
            progress.show(report.num_finished, report.num_rows, "rows", _speed(report))

    try:
        with (
            open_store(options, is_main=ranks.is_main) as stored,
            progress.bar if ranks.is_main else nullcontext(),
        ):
            report = decode_job(job, make_batches, engine, ranks, show)
    except KeyboardInterrupt:
        if ranks.is_main:
            paths = " and ".join(map(str, job.result_paths()))
            finished = f"finished rows are in {paths}" if paths else "no row was finished"
            note(f"interrupted: {finished}; run the same command to resume", style="")
        return INTERRUPTED
    if ranks.is_main:
        note(_line(report))
    ranks.close()
    return OK


def make_decoder(models: Models, arguments: Mapping[str, Any], is_chat: bool) -> RowDecoder:
    """Load the models and make the decoder, in this process or in an actor."""
    pair = load_pair(models, is_quiet=True)
    return RowDecoder(pair.target, pair.tokenizer, {**pair.arguments, **arguments}, is_chat)


def _speed(report: DatasetReport) -> str:
    parts = [f"{report.num_in_flight} in flight"] if report.num_in_flight else []
    parts.append(f"{report.tokens_per_s:.1f} tokens/s")
    if report.num_drafted:
        parts.append(f"{report.acceptance_rate:.0%} of drafted tokens accepted")
        parts.append(f"mean acceptance length {report.mean_acceptance_length:.2f}")
    return ", ".join(parts)


def _line(report: DatasetReport) -> str:
    before = f", {report.num_resumed} of them from earlier runs" if report.num_resumed else ""
    failed = f", {report.num_failed} with an error" if report.num_failed else ""
    static = f"; in static batches: {report.fallback}" if report.fallback else ""
    line = f"{counted(report.num_rows, 'row')} in {report.path}{before}{failed}{static}"
    if not report.num_tokens:
        return line
    return (
        f"{line}; {counted(report.num_tokens, 'token')} in {report.seconds:.1f} s, {_speed(report)}"
    )
