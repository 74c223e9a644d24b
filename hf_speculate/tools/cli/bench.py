"""`hf-speculate bench`: compares the speed of decoding methods, and the drift of lossy ones."""

from pathlib import Path
from typing import Any

from rich.console import Console

from hf_speculate.errors import ConfigError
from hf_speculate.tools.bench.comparison import Comparison, wrong_methods
from hf_speculate.tools.bench.methods import (
    DraftLen,
    Method,
    assisted_methods,
    default_verifier,
    drift_len,
    lookup_method,
    our_methods,
    parse_draft_lens,
    parse_thresholds,
    split,
    threshold_methods,
)
from hf_speculate.tools.bench.report import write_html
from hf_speculate.tools.cli import measuring
from hf_speculate.tools.cli.arguments import check_writable, decoding_of
from hf_speculate.tools.cli.console import INTERRUPTED, OK, REFUSED, answer, notes
from hf_speculate.tools.cli.loading import load_pair, names_head
from hf_speculate.tools.cli.measuring import show, shown
from hf_speculate.tools.cli.options import Generation, Grid, Models, PromptSet

_LOSSY = "typical"
_METHOD_HEADS = ("method", "tokens/s", "speed-up", "length", "accepted", "note")
_LATENCY_HEADS = ("method", "first token (ms)", "ms per token", "peak (GiB)")
_CATEGORY_HEADS = ("category", "method", "speed-up", "acceptance rate", "prompts")
_DRIFT_HEADS = ("verifier", "threshold", "tokens/s", "speed-up", "log-likelihood", "agreement with greedy")


def run(
    models: Models,
    prompt_set: PromptSet,
    repeats: int,
    as_json: bool,
    output: Path | None,
    html: Path | None,
    generation: Generation,
    grid: Grid,
    command: str = "",
) -> int:
    """Compare methods on prompts; `command` is the command line for the report."""
    decoding = decoding_of(generation, max_new_tokens=128)
    fields, sample = measuring.shared_fields(decoding, models, grid), decoding.do_sample
    lens, names = parse_draft_lens(grid.num_assistant_tokens), _verifiers(grid.verifiers, sample)
    methods = [*_theirs(models, grid, lens, sample), *our_methods(names, lens, sample, fields)]
    drift_methods = threshold_methods(names, parse_thresholds(grid.thresholds), [drift_len(lens)], sample, fields)
    for path in (output, html):
        check_writable(path)
    log, seed = notes(), generation.seed or 0
    prompts = measuring.prompts_of(prompt_set, log)
    pair = load_pair(models, log)
    batches = measuring.encode(prompts, prompt_set, pair)
    comparison = Comparison(methods, drift_methods, batches, sample, repeats, seed)
    with measuring.progress(log, comparison.num_steps) as on_step:
        found = comparison.run(measuring.decoder_of(pair, decoding), on_step=on_step)
    settings = measuring.settings_of(decoding, prompt_set, fields) | {
        "num_prompts": sum(len(batch.input_ids) for batch in batches),
        "repeats": repeats,
        "seed": seed,
        "drift_num_assistant_tokens": drift_len(lens).label if drift_methods else None,
        "left_out": found.pop("left_out"),
        "command": command,
    }
    result = {"environment": measuring.environment_of(pair, models), "settings": settings, **found}
    if not as_json:
        _show(result, log)  # first: results are visible even if they cannot be written
    measuring.show_doubts(result, log)
    measuring.write_results(result, as_json, output)
    if html is not None and result["methods"]:
        write_html(result, html)
        log.print(f"report: {html}", style="dim", markup=False, soft_wrap=True)
    if result["is_interrupted"]:
        return INTERRUPTED
    return REFUSED if wrong_methods(settings["left_out"], methods) else OK


def _theirs(models: Models, grid: Grid, lens: list[DraftLen], sample: bool) -> list[Method]:
    lookup = [] if grid.lookup is None else [lookup_method(grid.lookup, sample)]
    takes_draft = models.draft is not None and not names_head(models)  # transformers takes no heads
    return [*(assisted_methods(lens, sample) if takes_draft else []), *lookup]


def _verifiers(names: str | None, sample: bool) -> list[str]:
    found = [default_verifier(sample), _LOSSY] if names is None else split(names)
    if not found:
        raise ConfigError("--verifiers must name at least one, got none; leave it out for the default ones")
    return found


def _show(result: dict[str, Any], log: Console) -> None:
    settings, where = result["settings"], result["environment"]
    kind = "sampling" if settings["do_sample"] else "greedy"
    log.print(
        f"{where['device']}, {where['threads']} threads, {where['dtype']}, {settings['num_prompts']} prompts in "
        f"batches of {settings['batch_size']}, {kind}; medians (minimum-maximum) over batches",
        style="dim",
        soft_wrap=True,
    )
    if result["methods"]:
        show("speed", _METHOD_HEADS, [_method_cells(method) for method in result["methods"]])
        for line in _remarks(result["methods"]):
            answer(f"{line}\n")
        show("latency", _LATENCY_HEADS, [_latency_cells(method) for method in result["methods"]])
    if result["categories"]:
        entries = sorted(result["categories"], key=lambda entry: entry["category"])
        show("by category", _CATEGORY_HEADS, [_category_cells(entry) for entry in entries])
    if result["drift"]:
        show("drift of lossy verifiers", _DRIFT_HEADS, [_drift_cells(entry) for entry in result["drift"]])
    for name, reason in settings["left_out"].items():
        log.print(f"left out: {name}: {reason}", style="bold", markup=False, soft_wrap=True)


def _method_cells(method: dict[str, Any]) -> list[str]:
    return [
        method["name"],
        shown(method["tokens_per_s"]["median"], ".0f"),
        shown(method["speedup"]),
        shown(method["mean_acceptance_length"]),
        shown(method["acceptance_rate"], ".0%"),
        "noise" if method["is_noise"] else "lossy" if method["is_lossy"] else "-",
    ]


def _remarks(methods: list[dict[str, Any]]) -> list[str]:
    """Lines below the table: the comparison with plain decoding, and what is noise."""
    by_result: dict[str, list[str]] = {}
    for method in methods:
        if method["checked"]:
            by_result.setdefault(method["checked"], []).append(method["name"])
    lines = [f"compared with plain decoding: {found}: {'; '.join(names)}" for found, names in by_result.items()]
    noise = [f"{method['name']} ({method['speedup_bound']:.2f})" for method in methods if method["is_noise"]]
    return [*lines, *([f"noise: the speed-up is above the bound of the pair: {'; '.join(noise)}"] if noise else [])]


def _latency_cells(method: dict[str, Any]) -> list[str]:
    first, peak = method["first_token_s"], method["peak_bytes"]
    first_ms = None if first is None else {name: 1000 * value for name, value in first.items()}
    peak_gib = None if peak is None else peak / 2**30
    return [method["name"], shown(first_ms, ".1f"), shown(method["ms_per_token"], ".2f"), shown(peak_gib)]


def _category_cells(entry: dict[str, Any]) -> list[str]:
    numbers = [shown(entry["speedup"]), shown(entry["acceptance_rate"], ".0%"), str(entry["num_prompts"])]
    return [entry["category"], entry["method"], *numbers]


def _drift_cells(entry: dict[str, Any]) -> list[str]:
    return [
        entry["verifier"],
        shown(entry["posterior_threshold"], "g"),
        shown(entry["tokens_per_s"], ".0f"),
        shown(entry["speedup"]),
        shown(entry["log_likelihood_per_token"], ".3f"),
        shown(entry["agreement_with_greedy"], ".1%"),
    ]
