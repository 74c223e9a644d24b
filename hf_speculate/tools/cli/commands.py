"""Subcommands of `hf-speculate`.

The programs behind them import torch and transformers, so each is imported when its command runs: `--help` stays fast.
"""

import importlib
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

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
    grouped,
)


def _program(name: str) -> Any:
    return importlib.import_module(f"hf_speculate.tools.cli.{name}")


@grouped
def generate(
    models: Models,
    generation: Generation,
    speculation: Speculation,
    prompt: Annotated[
        str | None, typer.Argument(help="Prompt; - or none reads it from a pipe on the standard input.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="Prompts: a .jsonl file, a text file as one prompt, or - for JSON lines."),
    ] = None,
    chat: Chat = False,
    as_json: AsJson = False,
    output: Output = None,
) -> int:
    """Decode a prompt, or the prompts of a file, and print tokens as they come."""
    return int(_program("generate").run(models, prompt, file, chat, as_json, output, generation, speculation))


@grouped
def chat(
    models: Models,
    generation: Generation,
    speculation: Speculation,
    system: Annotated[str | None, typer.Option("--system", "-s", help="System prompt.")] = None,
) -> int:
    """Chat with a model in the terminal.

    Ctrl-C ends an answer. /clear starts over, /exit or Ctrl-D ends the chat.
    """
    return int(_program("generate").run_chat(models, system, generation, speculation))


@grouped
def batch(
    models: Models,
    generation: Generation,
    speculation: Speculation,
    ray: Ray,
    prompts: Prompts,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File for results, one JSON object per line; resumed if it exists.")
    ],
    rows: Rows = 8,
    static_batches: StaticBatches = False,
    chat: Chat = False,
    ordered: Annotated[bool, typer.Option("--ordered", help="Sort the finished output like the prompts.")] = False,
    if_changed: Annotated[
        Literal["refuse", "keep", "restart"],
        typer.Option("--if-changed", help="What to do with finished rows if prompts or settings have changed."),
    ] = "refuse",
    engine: Annotated[
        Literal["local", "ray"], typer.Option("--engine", help="Decode in this process, or on actors of Ray Data.")
    ] = "local",
) -> int:
    """Decode a file of prompts into a file of results; an interrupted run resumes.

    `accelerate launch` and `torchrun` split the prompts over their processes.
    """
    choices = (rows, static_batches, chat, ordered, if_changed, engine)
    return int(_program("batch").run(models, prompts, output, *choices, generation, speculation, ray))


@grouped
def bench(
    context: typer.Context,
    models: Models,
    prompt_set: PromptSet,
    generation: Generation,
    grid: Grid,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Repetitions of each prompt and method.")] = 1,
    as_json: AsJson = False,
    output: Output = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a report with plots to this file.")] = None,
) -> int:
    """Compare the speed of plain, assisted (transformers) and speculative decoding on your prompts.

    Exit status 1: the output of a lossless method differs from plain decoding's.
    """
    command = shlex.join(["hf-speculate", *(context.obj or ())])
    return int(_program("bench").run(models, prompt_set, repeats, as_json, output, html, generation, grid, command))


@grouped
def tune(
    models: Models,
    prompt_set: PromptSet,
    generation: Generation,
    grid: TuneGrid,
    quality: Annotated[
        str,
        typer.Option(
            "--quality",
            "-q",
            help="exact for lossless methods only, or bounds for lossy ones: agreement=0.95 (share of greedy tokens), "
            "drop=0.05 (nats per token).",
        ),
    ] = "exact",
    write: Annotated[
        Path | None, typer.Option("--write", help="Write the best fields to generation_config.json in this folder.")
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> int:
    """Find the fastest verifier, draft length and threshold for your prompts.

    Exit status 1: plain decoding is as fast.
    """
    return int(_program("tune").run(models, prompt_set, quality, write, as_json, output, generation, grid))


@grouped
def check(models: Models, as_json: AsJson = False, output: Output = None) -> int:
    """Check whether a draft model fits a target, with estimates of memory and speed-up.

    Downloads configs and tokenizers, but no weights. Exit status 0: "ok" or "warning"; 1: "does not fit" (another draft
    may fit) or "not supported" (one of the models is not, with any other); 2: a model or its config was not found.
    """
    return int(_program("check").run(models, as_json, output))


@grouped
def serve(
    models: Models,
    drafting: Drafting,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Requests that are decoded at once.")] = 8,
    max_queued: Annotated[
        int, typer.Option("--max-queued", min=0, help="Requests that wait for a row; further ones get status 429.")
    ] = 64,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. There is no authentication: 0.0.0.0 opens it to all.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option("--served-model-name", help="Name in requests. [dim]\\[default: TARGET][/dim]")
    ] = None,
) -> int:
    """Answer requests in OpenAI's format over HTTP, several at once.

    Endpoints: /v1/chat/completions, /v1/completions, /v1/models, /health. Sampling settings come with each request.
    """
    return int(_program("serve").run(models, drafting, rows, max_queued, host, port, name))


COMMANDS = (generate, chat, serve, batch, bench, tune, check)
