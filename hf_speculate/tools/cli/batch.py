"""`hf-speculate batch`: decodes a file of prompts into a file of results."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any

from hf_speculate.errors import ConfigError
from hf_speculate.tools.cli.arguments import arguments_of, read_prompts
from hf_speculate.tools.cli.console import INTERRUPTED, OK, ProgressNotes, notes
from hf_speculate.tools.cli.loading import check_device, load_pair, load_tokenizer
from hf_speculate.tools.cli.options import Batch, Models, Ray
from hf_speculate.tools.dataset.files import Job
from hf_speculate.tools.dataset.on_ray import on_ray
from hf_speculate.tools.dataset.ranks import find_ranks
from hf_speculate.tools.dataset.row_decoder import RowDecoder
from hf_speculate.tools.dataset.rows import Row, batches_of
from hf_speculate.tools.dataset.run import DatasetReport, in_this_process
from hf_speculate.tools.dataset.run import run as run_job

_LINE_EVERY_S = 60.0


def run(options: Batch) -> int:
    prompts, output, is_chat = options.prompts, options.output, options.chat
    arguments, models = arguments_of(options), options
    seed = arguments.pop("seed", None)
    on_ray_with = {one.name: value for one in fields(Ray) if (value := getattr(options, one.name)) is not None}
    is_on_ray = options.engine == "ray"
    if not is_on_ray:
        if on_ray_with:
            name = min(on_ray_with).replace("_", "-")
            raise ConfigError(f"--{name} must come with --engine ray, got --engine local; add --engine ray")
        check_device(options.device)  # with Ray, actors check their own machines
    rows = read_prompts(prompts, text_as=None)
    if output.exists() and prompts.exists() and output.samefile(prompts):
        raise ConfigError(f"the output must not be the file of prompts, got {output} twice; choose another output")
    given = {name: getattr(options, name) for name in ("target", "draft", "dtype", "chat")} | arguments
    job = Job(rows, output, given, seed, options.ordered, options.if_changed)
    ranks = find_ranks(is_cpu=options.device == "cpu")
    if is_on_ray and ranks.num > 1:
        raise ConfigError(
            f"--engine ray must be started once, got {ranks.num} ranks; leave the launcher out, Ray has its own workers"
        )
    if ranks.device is not None and options.device == "auto":
        models = replace(options, device=ranks.device)
    log = notes()
    load = partial(make_decoder, models, arguments, is_chat)
    num_refilled = 0 if options.static_batches else options.rows
    engine = on_ray(load, **on_ray_with) if is_on_ray else in_this_process(load, num_refilled)
    progress = ProgressNotes(log, "loading", _LINE_EVERY_S)

    def make_batches(left: Sequence[Row]) -> list[list[Row]]:
        return batches_of(left, options.rows, load_tokenizer(models), is_chat)

    def show(report: DatasetReport) -> None:
        progress.show(report.num_finished, report.num_rows, "rows", _speed(report))

    try:
        with progress.bar if ranks.is_main else nullcontext():
            report = run_job(job, make_batches, engine, ranks, show if ranks.is_main else None)
    except KeyboardInterrupt:
        if ranks.is_main:
            line = f"interrupted: finished rows are in {output}; run the same command to resume"
            log.print(line, markup=False, soft_wrap=True)
        return INTERRUPTED
    if ranks.is_main:
        log.print(_line(report), style="dim", soft_wrap=True)
    ranks.close()
    return OK


def make_decoder(models: Models, arguments: Mapping[str, Any], is_chat: bool) -> RowDecoder:
    """Load the decoder, in this process or in an actor."""
    pair = load_pair(models)
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
    line = f"{report.num_rows} rows in {report.path}{before}{failed}{static}"
    if not report.num_tokens:
        return line
    return f"{line}; {report.num_tokens} tokens in {report.seconds:.1f} s, {_speed(report)}"
