"""Command-line options that several commands share; imports neither torch nor transformers."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

_models = partial(typer.Option, rich_help_panel="Models")
_generation = partial(typer.Option, rich_help_panel="Generation")
_speculation = partial(typer.Option, rich_help_panel="Speculation")
_ray = partial(typer.Option, rich_help_panel="Ray")

Prompts = Annotated[
    Path, typer.Argument(help="Prompts: a .jsonl file (also Spec-Bench's), a text file with one per line, or -.")
]
Lookup = Annotated[
    int | None, _speculation("--lookup", help="Tokens to copy per round from earlier text (prompt lookup).")
]
DraftLens = Annotated[
    str,
    _speculation(
        "--num-assistant-tokens",
        "-k",
        help="Draft lengths to compare, separated by commas, such as 5,adaptive,adaptive:16.",
    ),
]
Thresholds = Annotated[
    str, _speculation("--thresholds", help="Values of posterior_threshold for lossy verifiers, separated by commas.")
]
Chat = Annotated[bool, typer.Option("--chat", help="Apply the tokenizer's chat template to prompts that are text.")]
BatchSize = Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Prompts that are decoded together.")]
Rows = Annotated[int, typer.Option("--rows", "--batch-size", "-b", min=1, help="Prompts that are decoded at once.")]
StaticBatches = Annotated[
    bool, typer.Option("--static-batches", help="Decode one batch after another, each until its slowest row ends.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Also write the results as JSON to this file.")]


@dataclass(frozen=True)
class Models:
    target: Annotated[str, typer.Argument(help="Model to decode with: a folder, or a name on the Hugging Face Hub.")]
    draft: Annotated[
        str | None, _models("--draft", "-d", help="Draft model or head: a folder, or a name on the Hub.")
    ] = None
    revision: Annotated[str | None, _models(help="Branch, tag or commit of the target on the Hub.")] = None
    dtype: Annotated[str, _models(help="auto, bfloat16, float16, float32 or float64.")] = "auto"
    device: Annotated[str, _models(help="cpu, cuda, ..., or map to spread over all devices.")] = "auto"
    attn_implementation: Annotated[str | None, _models(help="eager, sdpa, flash_attention_2, ...")] = None
    trust_remote_code: Annotated[
        bool, _models("--trust-remote-code", help="Run code from the models' repositories.")
    ] = False


@dataclass(frozen=True)
class Generation:
    max_new_tokens: Annotated[
        int | None,
        _generation(
            "--max-new-tokens",
            "-n",
            help="Largest number of new tokens. [dim]\\[default: 256; bench and tune: 128][/dim]",
        ),
    ] = None
    sample: Annotated[bool, _generation("--sample", "--do-sample", help="Sample instead of greedy decoding.")] = False
    temperature: Annotated[float | None, _generation("--temperature", "-t", help="Sampling temperature.")] = None
    top_p: Annotated[float | None, _generation(help="Sample from the most likely tokens of this mass.")] = None
    top_k: Annotated[int | None, _generation(help="Sample from this many most likely tokens; 0: all.")] = None
    repetition_penalty: Annotated[float | None, _generation(help="Penalty of repeated tokens; 1: none.")] = None
    seed: Annotated[int | None, _generation(help="Random seed; the same seed repeats a sample.")] = None
    settings: Annotated[
        list[str] | None,
        _generation(
            "--set",
            metavar="NAME=VALUE",
            help="Any other field of SpeculationConfig or GenerationConfig, with a JSON value; can be repeated. "
            "Advanced: speculation_cache, speculation_graphs, verifier_backend, entropy_epsilon.",
        ),
    ] = None


@dataclass(frozen=True)
class Drafting:
    num_assistant_tokens: Annotated[
        str | None,
        _speculation(
            "--num-assistant-tokens",
            "-k",
            help="Tokens to draft per round: 5, adaptive, or adaptive:16 for at most 16. "
            "[dim]\\[default: adaptive][/dim]",
        ),
    ] = None
    lookup: Lookup = None


@dataclass(frozen=True)
class Speculation(Drafting):
    verifier: Annotated[
        str | None,
        _speculation("--verifier", "-v", help="greedy, rejection, block, coupled (all lossless) or typical (lossy)."),
    ] = None


@dataclass(frozen=True)
class Grid:
    """Options of commands that measure several methods."""

    num_assistant_tokens: DraftLens = "adaptive,5"
    verifiers: Annotated[
        str | None,
        _speculation(
            "--verifiers",
            "-v",
            help="Verifiers, separated by commas. [dim]\\[default: the usual lossless one, and typical][/dim]",
        ),
    ] = None
    thresholds: Thresholds = "0.01,0.04,0.09,0.16,0.25,0.5"
    lookup: Lookup = None


@dataclass(frozen=True)
class TuneGrid(Grid):
    """Options of `tune`, with defaults of its own."""

    num_assistant_tokens: DraftLens = "2,3,5,8,12,adaptive:5,adaptive,adaptive:16"
    thresholds: Thresholds = "0.04,0.09,0.25"


@dataclass(frozen=True)
class PromptSet:
    prompts: Prompts
    num_prompts: Annotated[
        int | None,
        typer.Option("--num-prompts", min=1, help="Largest number of prompts, taken from each category in turn."),
    ] = None
    batch_size: BatchSize = 1
    chat: Chat = False


@dataclass(frozen=True)
class Ray:
    """Options of `batch --engine ray`."""

    workers: Annotated[int | None, _ray(help="Actors; default: one per GPU, or one.")] = None
    cpus_per_worker: Annotated[float | None, _ray(help="CPUs of an actor without a GPU; default: 1.")] = None
    gpus_per_worker: Annotated[float | None, _ray(help="GPUs of an actor; default: 1 if there are any.")] = None
    ray_address: Annotated[str | None, _ray(help="Address of a running cluster.")] = None
