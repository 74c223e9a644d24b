"""`hf-speculate bench`: how fast a pair decodes prompts, and how far lossy texts drift."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hf_speculate.errors import ConfigError
from hf_speculate.tools.bench.comparison import Comparison, wrong_methods
from hf_speculate.tools.bench.methods import (
    assisted_methods,
    default_verifier,
    drift_len,
    our_methods,
    parse_draft_lens,
    parse_thresholds,
    split,
    threshold_methods,
)
from hf_speculate.tools.bench.report import write_html
from hf_speculate.tools.cli import measuring, options
from hf_speculate.tools.cli.console import OK, REFUSED, notes
from hf_speculate.tools.cli.loading import load_pair
from hf_speculate.tools.cli.measuring import show, shown

Verifiers = Annotated[
    str | None,
    typer.Option("--verifiers", "-v", help="Names between commas; unset: the exact one of the mode, and typical."),
]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Times that every prompt is decoded by every method.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write a report with plots into this file.")]
_LOSSY = "typical"
_METHOD_HEADS = (
    "method",
    "tokens/s",
    "over plain",
    "mean length",
    "acceptance rate",
    "beside plain decoding's text",
)
_CATEGORY_HEADS = ("category", "method", "over plain", "acceptance rate", "prompts")
_DRIFT_HEADS = ("verifier", "threshold", "tokens/s", "over plain", "log-likelihood a token", "agreement with greedy")


def bench(
    target: options.Target,
    draft: measuring.DraftModel,
    prompts: measuring.Prompts,
    max_new_tokens: options.MaxNewTokens = 128,
    batch_size: measuring.BatchSize = 1,
    num_prompts: measuring.NumPrompts = None,
    verifiers: Verifiers = None,
    num_assistant_tokens: measuring.DraftLens = "adaptive,5",
    thresholds: measuring.Thresholds = "0.01,0.04,0.09,0.16,0.25,0.5",
    sample: options.Sample = False,
    temperature: options.Temperature = None,
    repeats: Repeats = 1,
    chat: measuring.Chat = False,
    seed: options.Seed = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    settings: options.Settings = None,
    json: measuring.Json = None,
    html: Html = None,
) -> None:
    """Time plain decoding, transformers' assisted generation and ours on your prompts.

    Exit status 1: an exact method wrote another text than plain decoding.
    """
    fields = measuring.shared_fields(settings)
    decoding = options.decoding_from(max_new_tokens, sample, temperature)
    lens, names = parse_draft_lens(num_assistant_tokens), _verifiers(verifiers, sample)
    methods = [*assisted_methods(lens, sample), *our_methods(names, lens, sample, fields)]
    drift_methods = threshold_methods(names, parse_thresholds(thresholds), [drift_len(lens)], sample, fields)
    for path in (json, html):
        measuring.check_folder_of(path)
    log = notes()
    pair = load_pair(target, draft, dtype, device, log)
    batches = measuring.encode(prompts, pair, batch_size, num_prompts, chat, log)
    comparison = Comparison(methods, drift_methods, batches, sample, repeats, seed or 0)
    decoder = measuring.decoder_of(pair, decoding)
    with measuring.progress(log, comparison.num_steps) as on_step:
        found = comparison.run(decoder, on_step=on_step)
    used = {
        **decoding,
        "batch_size": batch_size,
        "num_prompts": sum(len(batch.input_ids) for batch in batches),
        "prompts": str(prompts),
        "repeats": repeats,
        "seed": seed or 0,
        "fields": fields,
        "drift_num_assistant_tokens": drift_len(lens).label if drift_methods else None,
        "left_out": found.pop("left_out"),
    }
    result = {"environment": measuring.environment_of(pair, target, draft), "settings": used, **found}
    _show(result, log)  # first: what was measured is seen even where it cannot be written
    if json is not None:
        measuring.write_json(json, result)
    if html is not None:
        write_html(result, html)
    raise typer.Exit(REFUSED if wrong_methods(used["left_out"], methods) else OK)


def _verifiers(names: str | None, sample: bool) -> list[str]:
    found = [default_verifier(sample), _LOSSY] if names is None else split(names)
    if not found:
        raise ConfigError("--verifiers must name one at least, got none; leave it out for the default ones")
    return found


def _show(result: dict[str, Any], log: Console) -> None:
    conditions = result["environment"]
    kind = "sampling" if result["settings"]["do_sample"] else "greedy"
    log.print(
        f"{conditions['device']}, {conditions['threads']} threads, {conditions['dtype']}, "
        f"{result['settings']['num_prompts']} prompts in batches of {result['settings']['batch_size']}, {kind}; "
        "medians (minimum to maximum) over batches",
        style="dim",
        soft_wrap=True,
    )
    show("speed", _METHOD_HEADS, [_method_cells(method) for method in result["methods"]])
    if result["categories"]:
        entries = sorted(result["categories"], key=lambda entry: entry["category"])
        show("by category", _CATEGORY_HEADS, [_category_cells(entry) for entry in entries])
    if result["drift"]:
        show("drift of lossy verifiers", _DRIFT_HEADS, [_drift_cells(entry) for entry in result["drift"]])
    for name, reason in result["settings"]["left_out"].items():
        log.print(f"left out: {name}: {reason}", style="bold", markup=False, soft_wrap=True)


def _method_cells(method: dict[str, Any]) -> list[str]:
    return [
        method["name"],
        shown(method["tokens_per_s"], ".0f"),
        shown(method["speedup"]),
        shown(method["mean_acceptance_length"]),
        shown(method["acceptance_rate"], ".0%"),
        method["checked"] or ("lossy" if method["is_lossy"] else "-"),
    ]


def _category_cells(entry: dict[str, Any]) -> list[str]:
    figures = [shown(entry["speedup"]), shown(entry["acceptance_rate"], ".0%"), str(entry["num_prompts"])]
    return [entry["category"], entry["method"], *figures]


def _drift_cells(entry: dict[str, Any]) -> list[str]:
    return [
        entry["verifier"],
        shown(entry["posterior_threshold"], "g"),
        shown(entry["tokens_per_s"], ".0f"),
        shown(entry["speedup"]),
        shown(entry["log_likelihood_per_token"], ".3f"),
        shown(entry["agreement_with_greedy"], ".1%"),
    ]
