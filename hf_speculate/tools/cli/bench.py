"""`hf-speculate bench`: compares the speed of decoding methods, and the drift of lossy ones."""

import shlex
from typing import Any

from rich.console import Console

from hf_speculate.errors import ConfigError
from hf_speculate.tools.bench.comparison import Comparison
from hf_speculate.tools.bench.methods import (
    OURS,
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
from hf_speculate.tools.cli.arguments import decoding_of
from hf_speculate.tools.cli.console import INTERRUPTED, OK, REFUSED, answer, notes
from hf_speculate.tools.cli.loading import names_head
from hf_speculate.tools.cli.measuring import field, show, shown
from hf_speculate.tools.cli.options import Bench

_LOSSY = "typical"
# Cells by the head of the column.
_METHODS = {
    "method": field("name", ""),
    "tokens/s": lambda one: shown(one["tokens_per_s"]["median"], ".0f"),
    "speed-up": field("speedup"),
    "length": field("mean_acceptance_length"),
    "accepted": field("acceptance_rate", ".0%"),
    "note": lambda one: "noise" if one["is_noise"] else "lossy" if one["is_lossy"] else "-",
}
_LATENCIES = {
    "method": field("name", ""),
    "first token (ms)": field("first_token_s", ".1f", 1000),
    "ms per token": field("ms_per_token"),
    "peak (GiB)": field("peak_bytes", scale=2**-30),
}
_CATEGORIES = {
    "category": field("category", ""),
    "method": field("method", ""),
    "speed-up": field("speedup"),
    "acceptance rate": field("acceptance_rate", ".0%"),
    "prompts": field("num_prompts", "d"),
}
_DRIFT = {
    "verifier": field("verifier", ""),
    "threshold": field("posterior_threshold", "g"),
    "tokens/s": field("tokens_per_s", ".0f"),
    "speed-up": field("speedup"),
    "log-likelihood": field("log_likelihood_per_token", ".3f"),
    "agreement with greedy": field("agreement_with_greedy", ".1%"),
}


def run(options: Bench) -> int:
    decoding, sample, seed = decoding_of(options, max_new_tokens=128), options.sample, options.seed or 0
    fields, lens = measuring.shared_fields(decoding, options), parse_draft_lens(options.num_assistant_tokens)
    names = [default_verifier(sample), _LOSSY] if options.verifiers is None else split(options.verifiers)
    if not names:
        raise ConfigError("--verifiers must name at least one, got none; leave it out for the default ones")
    takes_draft = options.draft is not None and not names_head(options)  # transformers takes no heads
    methods = assisted_methods(lens, sample) if takes_draft else []
    methods += [] if options.lookup is None else [lookup_method(options.lookup, sample)]
    methods += our_methods(names, lens, sample, fields)
    drift_methods = threshold_methods(names, parse_thresholds(options.thresholds), [drift_len(lens)], sample, fields)
    log = notes()
    setup = measuring.load(options, decoding, log)
    comparison = Comparison(methods, drift_methods, setup.batches, sample, options.repeats, seed)
    with measuring.progress(log, comparison.num_steps) as on_step:
        found = comparison.run(setup.decoder, on_step=on_step)
    settings = measuring.settings_of(decoding, options, fields) | {
        "num_prompts": sum(len(batch.input_ids) for batch in setup.batches),
        "repeats": options.repeats,
        "seed": seed,
        "drift_num_assistant_tokens": drift_len(lens).label if drift_methods else None,
        "left_out": found.pop("left_out"),
        "command": shlex.join(["hf-speculate", *(options.context.obj or ())]),
    }
    result = {"environment": setup.environment, "settings": settings, **found}
    if not options.as_json:
        _show(result, log)  # first: results are visible even if they cannot be written
    measuring.finish(result, options, log)
    if options.html is not None and result["methods"]:
        write_html(result, options.html)
        log.print(f"report: {options.html}", style="dim", markup=False, soft_wrap=True)
    if result["is_interrupted"]:
        return INTERRUPTED
    is_wrong = any(method.engine == OURS and method.name in settings["left_out"] for method in methods)
    return REFUSED if is_wrong else OK


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
        show("speed", _METHODS, result["methods"])
        for line in _remarks(result["methods"]):
            answer(f"{line}\n")
        show("latency", _LATENCIES, result["methods"])
    if result["categories"]:
        show("by category", _CATEGORIES, sorted(result["categories"], key=lambda entry: entry["category"]))
    if result["drift"]:
        show("drift of lossy verifiers", _DRIFT, result["drift"])
    for name, reason in settings["left_out"].items():
        log.print(f"left out: {name}: {reason}", style="bold", markup=False, soft_wrap=True)


def _remarks(methods: list[dict[str, Any]]) -> list[str]:
    """Lines below the table: the comparison with plain decoding, and what is noise."""
    by_result: dict[str, list[str]] = {}
    for method in methods:
        if method["checked"]:
            by_result.setdefault(method["checked"], []).append(method["name"])
    lines = [f"compared with plain decoding: {found}: {'; '.join(names)}" for found, names in by_result.items()]
    noise = [f"{method['name']} ({method['speedup_bound']:.2f})" for method in methods if method["is_noise"]]
    return [*lines, *([f"noise: the speed-up is above the bound of the pair: {'; '.join(noise)}"] if noise else [])]
