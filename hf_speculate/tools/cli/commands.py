"""Commands of `hf-speculate`: the options of each, and the program that runs it.

The programs import torch and transformers, so each is imported when its command runs: `--help` stays fast.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from hf_speculate.tools.cli.options import (
    AsJson,
    Chat,
    Drafting,
    Generation,
    Grid,
    Models,
    Output,
    Prompts,
    PromptSet,
    Ray,
    Rows,
    Speculation,
    StaticBatches,
    TuneGrid,
)


class Interrupted(Exception):
    """Ctrl-C."""


@dataclass(frozen=True)
class Generate:
    """Decode a prompt, or the prompts of a file, and print tokens as they come."""

    models: Models
    generation: Generation
    speculation: Speculation
    prompt: Annotated[
        str | None, typer.Argument(help="Prompt; - or none reads it from a pipe on the standard input.")
    ] = None
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="Prompts: a .jsonl file, a text file as one prompt, or - for JSON lines."),
    ] = None
    chat: Chat = False
    as_json: AsJson = False
    output: Output = None


@dataclass(frozen=True)
class ChatInTerminal:
    """Chat with a model in the terminal.

    Ctrl-C ends an answer. /clear starts over, /exit or Ctrl-D ends the chat.
    """

    models: Models
    generation: Generation
    speculation: Speculation
    system: Annotated[str | None, typer.Option("--system", "-s", help="System prompt.")] = None


@dataclass(frozen=True)
class Batch:
    """Decode a file of prompts into a file of results; an interrupted run resumes.

    `accelerate launch` and `torchrun` split the prompts over their processes.
    """

    models: Models
    generation: Generation
    speculation: Speculation
    ray: Ray
    prompts: Prompts
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File for results, one JSON object per line; resumed if it exists.")
    ]
    rows: Rows = 8
    static_batches: StaticBatches = False
    chat: Chat = False
    ordered: Annotated[bool, typer.Option("--ordered", help="Sort the finished output like the prompts.")] = False
    if_changed: Annotated[
        Literal["refuse", "keep", "restart"],
        typer.Option("--if-changed", help="What to do with finished rows if prompts or settings have changed."),
    ] = "refuse"
    engine: Annotated[
        Literal["local", "ray"], typer.Option("--engine", help="Decode in this process, or on actors of Ray Data.")
    ] = "local"


@dataclass(frozen=True)
class Bench:
    """Compare the speed of plain, assisted (transformers) and speculative decoding on your prompts.

    Exit status 1: the output of a lossless method differs from plain decoding's.
    """

    context: typer.Context
    models: Models
    prompt_set: PromptSet
    generation: Generation
    grid: Grid
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Repetitions of each prompt and method.")] = 1
    as_json: AsJson = False
    output: Output = None
    html: Annotated[Path | None, typer.Option("--html", help="Write a report with plots to this file.")] = None


@dataclass(frozen=True)
class Tune:
    """Find the fastest verifier, draft length and threshold for your prompts.

    Exit status 1: plain decoding is as fast.
    """

    models: Models
    prompt_set: PromptSet
    generation: Generation
    grid: TuneGrid
    quality: Annotated[
        str,
        typer.Option(
            "--quality",
            "-q",
            help="exact for lossless methods only, or bounds for lossy ones: agreement=0.95 (share of greedy tokens), "
            "drop=0.05 (nats per token).",
        ),
    ] = "exact"
    write: Annotated[
        Path | None, typer.Option("--write", help="Write the best fields to generation_config.json in this folder.")
    ] = None
    as_json: AsJson = False
    output: Output = None


@dataclass(frozen=True)
class Check:
    """Check whether a draft model fits a target, with estimates of memory and speed-up.

    Downloads configs and tokenizers, but no weights. Exit status 0: "ok" or "warning"; 1: "does not fit" (another draft
    may fit) or "not supported" (one of the models is not, with any other); 2: a model or its config was not found.
    """

    models: Models
    as_json: AsJson = False
    output: Output = None


@dataclass(frozen=True)
class Serve:
    """Answer requests in OpenAI's format over HTTP, several at once.

    Endpoints: /v1/chat/completions, /v1/completions, /v1/models, /health. Sampling settings come with each request.
    """

    models: Models
    drafting: Drafting
    rows: Annotated[int, typer.Option("--rows", min=1, help="Requests that are decoded at once.")] = 8
    max_queued: Annotated[
        int, typer.Option("--max-queued", min=0, help="Requests that wait for a row; further ones get status 429.")
    ] = 64
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. There is no authentication: 0.0.0.0 opens it to all.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="Port; 0 takes a free one.")] = 8000
    name: Annotated[
        str | None, typer.Option("--served-model-name", help="Name in requests. [dim]\\[default: TARGET][/dim]")
    ] = None


# Options and program (module of this package, function) of each command, in the order of the help.
_COMMANDS: dict[str, tuple[type, str, str]] = {
    "generate": (Generate, "generate", "run"),
    "chat": (ChatInTerminal, "generate", "run_chat"),
    "serve": (Serve, "serve", "run"),
    "batch": (Batch, "batch", "run"),
    "bench": (Bench, "bench", "run"),
    "tune": (Tune, "tune", "run"),
    "check": (Check, "check", "run"),
}


def add_commands(app: typer.Typer) -> None:
    """Add all commands; each calls its program with an object of its options."""
    for name, (options, module, function) in _COMMANDS.items():
        app.command(name)(_command(options, module, function))


def _command(options: type, module: str, function: str) -> Callable[..., int]:
    def command(**values: Any) -> int:
        program = getattr(importlib.import_module(f"hf_speculate.tools.cli.{module}"), function)
        try:
            return int(program(_made(options, values)))
        except KeyboardInterrupt as error:  # typer would end without a word
            raise Interrupted from error

    parameters = list(_parameters(options))
    command.__doc__ = options.__doc__
    vars(command)["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameters(options: Any) -> Iterator[inspect.Parameter]:
    """A parameter for each field, and for those of groups of options."""
    hints = get_type_hints(options, include_extras=True)
    for entry in fields(options):
        if is_dataclass(hints[entry.name]):
            yield from _parameters(hints[entry.name])
        else:
            default = inspect.Parameter.empty if entry.default is MISSING else entry.default
            kind = inspect.Parameter.KEYWORD_ONLY
            yield inspect.Parameter(entry.name, kind, default=default, annotation=hints[entry.name])


def _made(options: Any, values: dict[str, Any]) -> Any:
    hints = get_type_hints(options)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    return options(**{name: _made(groups[name], values) if name in groups else values[name] for name in hints})
