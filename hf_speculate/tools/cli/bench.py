"""`hf-speculate bench`: compares the speed of decoding methods, and the drift of lossy ones."""

import shlex
from typing import Any

from rich.console import Console

from hf_speculate.errors import ConfigError
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
from hf_speculate.tools.bench.report.values import CATEGORIES, DRIFT, LATENCIES, METHODS, field, make_table
from hf_speculate.tools.bench.results import Comparison
from hf_speculate.tools.cli import measuring
from hf_speculate.tools.cli.arguments import decoding_of
from hf_speculate.tools.cli.console import INTERRUPTED, OK, REFUSED, answer, notes
from hf_speculate.tools.cli.loading import names_head
from hf_speculate.tools.cli.options import Bench

_LOSSY = "typical"
_SHORT = {"acceptance length": "length", "acceptance rate": "accepted"}
_HIDDEN = ("verifier", "K", "compared with plain")  # the name has the first two; lines below the table have the third


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
    setup = measuring.load(options, decoding, fields, log)
    comparison = Comparison(methods, drift_methods, setup.batches, sample, options.repeats, seed)
    with measuring.progress(log, comparison.num_steps) as on_step:
        found = comparison.run(setup.decoder, on_step=on_step)
    settings = setup.settings | {
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
        f"batches of {settings['batch_size']}, {kind}; medians (minimum to maximum) over batches",
        style="dim",
        soft_wrap=True,
    )
    methods, own = result["methods"], {"method": field("name")}
    columns = {head: cell for head, cell in (METHODS | own).items() if head not in _HIDDEN}
    # short, for narrow terminals
    columns["tokens/s"] = lambda one: f"{one['tokens_per_s']['median']:.0f}"
    columns["speed-up"] = lambda one: METHODS["speed-up"](one).replace(" to ", "-")
    columns = {_SHORT.get(head, head): cell for head, cell in columns.items()}
    measuring.show(make_table("speed", "", columns, methods, 2))
    for line in _remarks(methods):
        answer(f"{line}\n")
    measuring.show(make_table("latency", "", LATENCIES | own, methods, 1))
    categories = sorted(result["categories"], key=lambda entry: str(entry["category"]))
    measuring.show(make_table("by category", "", CATEGORIES, categories, 2))
    measuring.show(make_table("drift of lossy verifiers", "", DRIFT, result["drift"], 1))
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
