"""Commands of `hf-speculate` as dataclasses of options, without importing torch or transformers.

typer builds a command from each class. Its instance is passed to the command's function in
`COMMANDS`.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer


def _readable(path: Path | None) -> Path | None:
    if path is not None and str(path) != "-" and not path.is_file():
        raise typer.BadParameter(
            f"the file of prompts must exist, got {path}; write one prompt per line into it"
        )
    return path


def names_data_set(path: Path) -> bool:
    """Return whether a path is a parquet file or a name on the Hub.

    A name has two parts, and the first is not a local folder.
    """
    is_name = (
        path.suffix not in (".json", ".jsonl", ".txt")
        and len(path.parts) == 2
        and not path.is_absolute()
    )
    return path.suffix == ".parquet" or (is_name and not path.parent.exists())


def _prompts(path: Path) -> Path | None:
    return path if names_data_set(path) and path.suffix != ".parquet" else _readable(path)


def _writable(path: Path | None) -> Path | None:
    if path is not None and not path.resolve().parent.is_dir():
        raise typer.BadParameter(
            f"the folder of {path} must exist, got none; create it, or name another file"
        )
    return path


_models = partial(typer.Option, rich_help_panel="Models")
_generation = partial(typer.Option, rich_help_panel="Generation")
_speculation = partial(typer.Option, rich_help_panel="Speculation")
_draft_lens = partial(_speculation, "--num-assistant-tokens", "-k")
_data = partial(typer.Option, rich_help_panel="Data")
_ray = partial(typer.Option, rich_help_panel="Ray")
# checked before models are loaded
_output = partial(typer.Option, dir_okay=False, callback=_writable)

Prompts = Annotated[
    Path,
    typer.Argument(
        callback=_prompts,
        help="Prompts: a .jsonl file (also Spec-Bench's), a text file with one per line, -, "
        "a .parquet file, or a data set of the Hub by its name.",
    ),
]
Lookup = Annotated[
    int | None, _speculation(help="Tokens to copy per round from earlier text (prompt lookup).")
]
DraftLens = Annotated[
    str,
    _draft_lens(
        help="Draft lengths to compare, separated by commas, such as 5,adaptive,adaptive:16."
    ),
]
Thresholds = Annotated[
    str,
    _speculation(help="Values of posterior_threshold for lossy verifiers, separated by commas."),
]
Chat = Annotated[
    bool,
    typer.Option("--chat", help="Apply the tokenizer's chat template to prompts that are text."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Output = Annotated[
    Path | None, _output("--output", "-o", help="Also write the results as JSON to this file.")
]


@dataclass(frozen=True, kw_only=True)
class Models:
    target: Annotated[
        str,
        typer.Argument(
            help="Model to decode with: a folder, or a name on the Hugging Face Hub. A draft head "
            "whose config names its target drafts for that."
        ),
    ]
    draft: Annotated[
        str | None,
        _models("--draft", "-d", help="Draft model or head: a folder, or a name on the Hub."),
    ] = None
    revision: Annotated[str | None, _models(help="Branch, tag or commit of TARGET on the Hub.")] = (
        None
    )
    draft_revision: Annotated[
        str | None, _models(help="Branch, tag or commit of the draft on the Hub.")
    ] = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32", "float64"],
        _models(help="auto (the checkpoint's), bfloat16, float16, float32 or float64."),
    ] = "auto"
    device: Annotated[str, _models(help="cpu, cuda, ..., or map to spread over all devices.")] = (
        "auto"
    )
    attn_implementation: Annotated[
        str | None, _models(help="eager, sdpa, flash_attention_2, ...")
    ] = None
    trust_remote_code: Annotated[
        bool, _models("--trust-remote-code", help="Run code from the models' repositories.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class Generation:
    max_new_tokens: Annotated[
        int | None,
        _generation(
            "--max-new-tokens",
            "-n",
            help="Largest number of new tokens.",
            show_default="256; bench and tune: 128",
        ),
    ] = None
    sample: Annotated[
        bool, _generation("--sample", "--do-sample", help="Sample instead of greedy decoding.")
    ] = False
    temperature: Annotated[
        float | None, _generation("--temperature", "-t", help="Sampling temperature.")
    ] = None
    top_p: Annotated[
        float | None, _generation(help="Sample from the most likely tokens of this mass.")
    ] = None
    top_k: Annotated[
        int | None, _generation(help="Sample from this many most likely tokens; 0: all.")
    ] = None
    repetition_penalty: Annotated[
        float | None, _generation(help="Penalty of repeated tokens; 1: none.")
    ] = None
    seed: Annotated[
        int | None, _generation(help="Random seed; the same seed repeats a sample.")
    ] = None
    settings: Annotated[
        list[str] | None,
        _generation(
            "--set",
            metavar="NAME=VALUE",
            help="Any other field of SpeculationConfig or GenerationConfig, with a JSON value; can "
            "be repeated. Advanced: speculation_cache, speculation_graphs, verifier_backend, "
            "entropy_epsilon.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Drafting:
    num_assistant_tokens: Annotated[
        str | None,
        _draft_lens(
            help="Tokens to draft per round: 5, adaptive, or adaptive:16 for at most 16; 0 drafts "
            "none.",
            show_default="adaptive",
        ),
    ] = None
    lookup: Lookup = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """Options for prompts from a data set."""

    column: Annotated[
        str | None,
        _data(
            help="Column, or field of a JSON line, with the prompt: a text, a chat or turns.",
            show_default="prompt",
        ),
    ] = None
    split: Annotated[str, _data(help="Split of a data set on the Hub.")] = "train"
    subset: Annotated[str | None, _data(help="Subset of a data set on the Hub.")] = None


@dataclass(frozen=True, kw_only=True)
class StoredModels(Drafting, Models):
    """Options for keeping outputs for later runs."""

    store: Annotated[
        Path | None,
        _speculation(
            dir_okay=False,
            callback=_writable,
            help="File with outputs of earlier runs, from which --lookup (10 if it is left out) "
            "copies too; written at the end.",
        ),
    ] = None
    store_tokens: Annotated[
        int,
        _speculation(
            min=1024, help="Tokens that this file holds at most; the oldest half goes first."
        ),
    ] = 200_000


@dataclass(frozen=True, kw_only=True)
class Speculation(Drafting, Generation, Models):
    verifier: Annotated[
        str | None,
        _speculation(
            "--verifier",
            "-v",
            help="greedy, rejection, block, coupled (all lossless) or typical (lossy).",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Generate(Speculation):
    """Decode a prompt, or the prompts of a file, and print tokens as they come."""

    prompt: Annotated[
        str | None,
        typer.Argument(help="Prompt; - or none reads it from a pipe on the standard input."),
    ] = None
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            callback=_readable,
            help="Prompts: a .jsonl file, a text file as one prompt, or - for JSON lines.",
        ),
    ] = None
    chat: Chat = False
    as_json: AsJson = False
    output: Output = None


@dataclass(frozen=True, kw_only=True)
class ChatInTerminal(Speculation):
    """Chat with a model in the terminal.

    Ctrl-C ends an answer. /clear starts over, /exit, /quit or Ctrl-D ends the chat, /help lists
    these commands.
    """

    system: Annotated[str | None, typer.Option("--system", "-s", help="System prompt.")] = None


@dataclass(frozen=True, kw_only=True)
class Ray:
    """Options of `batch --engine ray`."""

    workers: Annotated[int | None, _ray(min=1, help="Actors; default: one per GPU, or one.")] = None
    cpus_per_worker: Annotated[
        float | None, _ray(min=0, help="CPUs of an actor without a GPU; default: 1.")
    ] = None
    gpus_per_worker: Annotated[
        float | None, _ray(min=0, help="GPUs of an actor; default: 1 if there are any.")
    ] = None
    ray_address: Annotated[str | None, _ray(help="Address of a running cluster.")] = None


@dataclass(frozen=True, kw_only=True)
class Batch(Ray, Table, StoredModels, Speculation):
    """Decode a file of prompts into a file of results; an interrupted run resumes.

    `accelerate launch` and `torchrun` split the prompts over their processes.
    """

    prompts: Prompts
    output: Annotated[
        Path,
        _output(
            "--output",
            "-o",
            help="File for results, one JSON object per line; resumed if it exists.",
        ),
    ]
    rows: Annotated[
        int, typer.Option("--rows", "--batch-size", "-b", min=1, help="Prompts decoded at once.")
    ] = 8
    static_batches: Annotated[
        bool,
        typer.Option(
            "--static-batches",
            help="Decode one batch after another, each until its slowest row ends.",
        ),
    ] = False
    chat: Chat = False
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Sort the finished output like the prompts.")
    ] = False
    if_changed: Annotated[
        Literal["refuse", "keep", "restart"],
        typer.Option(help="What to do with finished rows if prompts or settings have changed."),
    ] = "refuse"
    engine: Annotated[
        Literal["local", "ray"],
        typer.Option(help="Decode in this process, or on actors of Ray Data."),
    ] = "local"


@dataclass(frozen=True, kw_only=True)
class Measurement(Table, Generation, Models):
    """Options for measuring several methods."""

    prompts: Prompts
    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Largest number of prompts, taken from each category in turn."),
    ] = None
    batch_size: Annotated[
        int, typer.Option("--batch-size", "-b", min=1, help="Prompts decoded together.")
    ] = 1
    chat: Chat = False
    num_assistant_tokens: DraftLens = "adaptive,5"
    verifiers: Annotated[
        str | None,
        _speculation(
            "--verifiers",
            "-v",
            help="Verifiers, separated by commas.",
            show_default="the usual lossless one, and typical",
        ),
    ] = None
    thresholds: Thresholds = "0.01,0.04,0.09,0.16,0.25,0.5"
    lookup: Lookup = None
    as_json: AsJson = False
    output: Output = None


@dataclass(frozen=True, kw_only=True)
class Bench(Measurement):
    """Compare the speed of plain, assisted (transformers) and speculative decoding on your prompts.

    Exit status 1: the output of a lossless method differs from plain decoding's.
    """

    context: typer.Context
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each prompt and method.")] = 1
    html: Annotated[Path | None, _output(help="Write a report with plots to this file.")] = None


@dataclass(frozen=True, kw_only=True)
class Tune(Measurement):
    """Find the fastest verifier, draft length and threshold for your prompts.

    Exit status 1: plain decoding is as fast.
    """

    num_assistant_tokens: DraftLens = "2,3,5,8,12,adaptive:5,adaptive,adaptive:16"
    thresholds: Thresholds = "0.04,0.09,0.25"
    quality: Annotated[
        str,
        typer.Option(
            "--quality",
            "-q",
            help="exact for lossless methods only, or bounds for lossy ones: agreement=0.95 (share "
            "of greedy tokens), drop=0.05 (nats per token).",
        ),
    ] = "exact"
    write: Annotated[
        Path | None,
        typer.Option(help="Write the best fields to generation_config.json in this folder."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Check(Models):
    """Check a draft model for a target, with estimates of memory and speed-up; or a target alone.

    Downloads configs and tokenizers, but no weights. Exit status 0: "ok" or "warning"; 1: "does not
    fit" (another draft may fit) or "not supported" (one of the models is not, with any other); 2: a
    model or its config was not found.
    """

    as_json: AsJson = False
    output: Output = None


@dataclass(frozen=True, kw_only=True)
class Serve(StoredModels):
    """Answer requests in OpenAI's format over HTTP, several at once.

    Endpoints: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics. Browsers find a
    chat page at /. Sampling settings come with each request.
    """

    rows: Annotated[int, typer.Option(min=1, help="Requests that are decoded at once.")] = 8
    max_queued: Annotated[
        int, typer.Option(min=0, help="Requests that wait for a row; further ones get status 429.")
    ] = 64
    max_cache_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of the target's cache: rows that are decoded at once, times the tokens of "
            "the longest. Other requests wait; longer ones are refused.",
            show_default="no limit",
        ),
    ] = None
    grammar_seconds: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="Seconds that compiling the schema of a response_format or of tools may take.",
        ),
    ] = 10.0
    max_schema_bytes: Annotated[
        int, typer.Option(min=1, help="Bytes of such a schema as JSON.")
    ] = 1_000_000
    grammar_memory_bytes: Annotated[
        int, typer.Option(min=1, help="Bytes of memory that compiling it may take, on Linux.")
    ] = 1_000_000_000
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. There is no authentication: 0.0.0.0 opens it to all."
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, help="Port; 0 takes a free one.")
    ] = 8000
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            metavar="NAME",
            help="Name of this machine in requests, besides --host, localhost and IP addresses; "
            "can be repeated. * for all.",
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option("--served-model-name", help="Name in requests.", show_default="TARGET"),
    ] = None
    page: Annotated[bool, typer.Option("--page/--no-page", help="Serve a chat page at /.")] = True


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Check the devices of this machine: Triton kernels, CUDA graphs and texts of a small pair.

    Prints what is installed and what each check saw. Nothing is downloaded or kept. Each check runs
    in another process, for 120 s at most. Exit status 1: something is wrong; the last line says
    what to set.
    """

    as_json: AsJson = False


# Options -> name of the command, and module and function of this package. The help keeps this
# order.
COMMANDS: dict[type[Models | Doctor], tuple[str, str]] = {
    Generate: ("generate", "generate:run"),
    ChatInTerminal: ("chat", "generate:run_chat"),
    Serve: ("serve", "serve:run"),
    Batch: ("batch", "batch:run"),
    Bench: ("bench", "measuring:run_bench"),
    Tune: ("tune", "measuring:run_tune"),
    Check: ("check", "check:run"),
    Doctor: ("doctor", "doctor:run"),
}
