"""`hf-speculate bench`: compares the speed of decoding methods, and the drift of lossy ones."""

import shlex
from typing import Any

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
from hf_speculate.tools.bench.report.page import write_html
from hf_speculate.tools.bench.report.values import CATEGORIES, DRIFT, LATENCIES, METHODS, field
from hf_speculate.tools.bench.results import Comparison
from hf_speculate.tools.cli import measuring
from hf_speculate.tools.cli.arguments import decoding_of
from hf_speculate.tools.cli.console import INTERRUPTED, OK, REFUSED, answer, note
from hf_speculate.tools.cli.loading import names_head
from hf_speculate.tools.cli.options import Bench

_SHORT = {"acceptance length": "length", "acceptance rate": "accepted"}
_HIDDEN = ("verifier", "K", "compared with plain")  # the name has the first two; lines below the table have the third


def run(options: Bench) -> int:
    decoding, sample, seed = decoding_of(options, max_new_tokens=128), options.sample, options.seed or 0
    fields, lens = measuring.shared_fields(decoding, options), parse_draft_lens(options.num_assistant_tokens)
    names = [default_verifier(sample), "typical"] if options.verifiers is None else split(options.verifiers)
    if not names:
        raise ConfigError("--verifiers must name at least one, got none; leave it out for the default ones")
    takes_draft = options.draft is not None and not names_head(options)  # transformers takes no heads
    methods = assisted_methods(lens, sample) if takes_draft else []
    methods += [] if options.lookup is None else [lookup_method(options.lookup, sample)]
    methods += our_methods(names, lens, sample, fields)
    drift_methods = threshold_methods(names, parse_thresholds(options.thresholds), [drift_len(lens)], sample, fields)
    setup = measuring.load(options, decoding, fields)
    comparison = Comparison(methods, drift_methods, setup.batches, sample, options.repeats, seed)
    with measuring.progress(comparison.num_steps) as on_step:
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
        _show(result)  # first: results are visible even if they cannot be written
    measuring.finish(result, options)
    if options.html is not None and result["methods"]:
        write_html(result, options.html)
        note(f"report: {options.html}")
    if result["is_interrupted"]:
        return INTERRUPTED
    is_wrong = any(method.engine == OURS and method.name in settings["left_out"] for method in methods)
    return REFUSED if is_wrong else OK


def _show(result: dict[str, Any]) -> None:
    settings, where, methods = result["settings"], result["environment"], result["methods"]
    note(
        f"{where['device']}, {where['threads']} threads, {where['dtype']}, {settings['num_prompts']} prompts in "
        f"batches of {settings['batch_size']}, {'sampling' if settings['do_sample'] else 'greedy'}; "
        "medians (minimum to maximum) over batches"
    )
    own = {"method": field("name")}
    # short, for narrow terminals
    own_speed = own | {
        "tokens/s": lambda one: f"{one['tokens_per_s']['median']:.0f}",
        "speed-up": lambda one: METHODS["speed-up"](one).replace(" to ", "-"),
    }
    shown = {head: cell for head, cell in (METHODS | own_speed).items() if head not in _HIDDEN}
    measuring.show("speed", {_SHORT.get(head, head): cell for head, cell in shown.items()}, methods, 2)
    for line in _remarks(methods):
        answer(f"{line}\n")
    measuring.show("latency", LATENCIES | own, methods, 1)
    measuring.show("by category", CATEGORIES, sorted(result["categories"], key=lambda one: str(one["category"])), 2)
    measuring.show("drift of lossy verifiers", DRIFT, result["drift"], 1)
    for name, reason in settings["left_out"].items():
        note(f"left out: {name}: {reason}", style="bold")


def _remarks(methods: list[dict[str, Any]]) -> list[str]:
    by_result: dict[str, list[str]] = {}
    for method in methods:
        if method["checked"]:
            by_result.setdefault(method["checked"], []).append(method["name"])
    lines = [f"compared with plain decoding: {found}: {'; '.join(names)}" for found, names in by_result.items()]
    noise = [f"{method['name']} ({method['speedup_bound']:.2f})" for method in methods if method["is_noise"]]
    return [*lines, *([f"noise: the speed-up is above the bound of the pair: {'; '.join(noise)}"] if noise else [])]
