"""`hf-speculate bench` and `tune`: compare decoding methods, and find the fastest settings."""

import itertools
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast

import rich.table
from rich.box import SIMPLE_HEAD
from rich.console import Console
from transformers.utils import logging

from hf_speculate.errors import ConfigError, counted
from hf_speculate.tools.bench import methods, tuning
from hf_speculate.tools.bench.decoding import Batch, Decoder, Run, make_batches, take_in_turn
from hf_speculate.tools.bench.methods import Method, parse_draft_lens, parse_thresholds
from hf_speculate.tools.bench.quality import Rule, TextCheck, drift_of_runs, parse_rule
from hf_speculate.tools.bench.report import values
from hf_speculate.tools.bench.report.page import write_html
from hf_speculate.tools.bench.report.values import METHODS, MISSING, Columns, Result, field
from hf_speculate.tools.bench.results import Comparison, environment
from hf_speculate.tools.cli.arguments import Decoding, decoding_of, read_prompts
from hf_speculate.tools.cli.console import (
    INTERRUPTED,
    OK,
    REFUSED,
    ProgressNotes,
    answer,
    note,
    notes,
    write_json,
)
from hf_speculate.tools.cli.loading import load_pair, names_head, with_named_target
from hf_speculate.tools.cli.options import Bench, Measurement, Tune
from hf_speculate.tools.dataset.rows import encode_rows

_SHORT = {"acceptance length": "length", "acceptance rate": "accepted"}
# The name contains the verifier and K. Lines below the table report the comparison.
_HIDDEN = ("verifier", "K", "compared with plain")
_PIPED_WIDTH = 160  # width of tables in columns if there is no terminal


def run_bench(options: Bench) -> int:
    options = with_named_target(options)
    decoding, sample, seed = (
        decoding_of(options, max_new_tokens=128),
        options.sample,
        options.seed or 0,
    )
    fields, lens = _shared_fields(decoding, options), parse_draft_lens(options.num_assistant_tokens)
    verifiers = [methods.default_verifier(sample), "typical"]
    if options.verifiers is not None and not (verifiers := methods.split(options.verifiers)):
        raise ConfigError(
            "--verifiers must name at least one, got none; leave it out for the default ones"
        )
    compared = []
    if options.draft is not None and not names_head(options):  # transformers does not support heads
        compared = methods.assisted_methods(lens, sample)
    if options.lookup is not None:
        compared.append(methods.lookup_method(options.lookup, sample))
    compared += methods.our_methods(verifiers, lens, sample, fields)
    # Lossy texts depend on the draft length, so drift is measured with a single draft length.
    drift_len = next((draft_len for draft_len in lens if not draft_len.is_adaptive), lens[0])
    thresholds = parse_thresholds(options.thresholds)
    drift_methods = methods.our_methods(verifiers, [drift_len], sample, fields, thresholds)
    decoder, batches, result = _load(options, decoding, fields)
    comparison = Comparison(compared, drift_methods, batches, options.repeats, seed)
    with progress(comparison.num_steps) as on_step:
        result |= comparison.run(decoder, on_step=on_step)
    left_out = result.pop("left_out")
    result["settings"] |= {
        "counted": result.pop("counted"),
        "num_prompts": sum(len(batch.input_ids) for batch in batches),
        "repeats": options.repeats,
        "seed": seed,
        "drift_num_assistant_tokens": drift_len.label if drift_methods else None,
        "left_out": left_out,
        "command": shlex.join(["hf-speculate", *(options.context.obj or ())]),
    }
    _finish(result, options, _show_comparison)
    if options.html is not None and result["methods"]:
        write_html(result, options.html)
        note(f"report: {options.html}")
    if result["is_interrupted"]:
        return INTERRUPTED
    is_wrong = any(method.engine == methods.OURS and method.name in left_out for method in compared)
    return REFUSED if is_wrong else OK


def run_tune(options: Tune) -> int:
    options = with_named_target(options)
    write, rule, decoding = (
        options.write,
        parse_rule(options.quality),
        decoding_of(options, max_new_tokens=128),
    )
    fields, sample = _shared_fields(decoding, options), options.sample
    lens, thresholds = (
        parse_draft_lens(options.num_assistant_tokens),
        parse_thresholds(options.thresholds),
    )
    tried = tuning.candidates(rule, lens, thresholds, sample, fields, options.verifiers or "")
    if not tried:
        raise ConfigError(
            f"--verifiers must name one that --quality {rule} allows, got {options.verifiers}; "
            "leave it out"
        )
    if write is not None:
        tuning.settings_in(write)
    decoder, batches, result = _load(options, decoding, fields)
    with progress(tuning.num_steps(len(tried), len(batches))) as on_step:
        drift = partial(drift_of_runs, decoder.target)
        instruments = tuning.Instruments(decoder, TextCheck(decoder), drift, on_step)
        tuned = tuning.tune(tried, batches, rule, instruments, options.seed or 0)
    result["settings"]["quality"] = str(rule)
    result |= tuned.as_dict()
    _finish(result, options, partial(_show_trials, rule=rule))
    if tuned.is_interrupted:
        return INTERRUPTED
    say = note if options.as_json else answer
    if tuned.winner is None:
        is_allowed = any(not trial.complaint for trial in tuned.trials)
        why = (
            "plain decoding is as fast as any method"
            if is_allowed
            else "no method has the required quality"
        )
        say(f"do not speculate: {why}; nothing is written")
        return REFUSED
    say(f"best: {tuned.winner.name}\n{json.dumps(tuned.fields, indent=2, sort_keys=True)}")
    if write is not None:
        note(f"written to {tuning.write_fields(write, tuned.fields)}")
    return OK


def _shared_fields(decoding: Decoding, options: Measurement) -> dict[str, Any]:
    """Return the fields from `--set` and `--lookup`, which all methods of this library share."""
    varied = sorted(set(decoding.fields) & tuning.TUNED_NAMES - {"posterior_alpha"})
    if varied:
        hint = "use --verifiers, --num-assistant-tokens and --thresholds"
        raise ConfigError(
            f"--set must leave out the fields in which methods differ, got {', '.join(varied)}; "
            f"{hint}"
        )
    fields = decoding.fields | (
        {} if options.lookup is None else {"prompt_lookup_num_tokens": options.lookup}
    )
    if options.draft is None and fields.get("prompt_lookup_num_tokens") is None:
        raise ConfigError(
            "there must be --draft or --lookup, got neither; name a draft model, or add --lookup 10"
        )
    return fields


def _load(
    options: Measurement, decoding: Decoding, fields: dict[str, Any]
) -> tuple[Decoder, list[Batch], dict[str, Any]]:
    """Read the prompts, then load the models.

    Returns:
        The decoder, the batches, and the first entries of the result.
    """
    prompts = read_prompts(options.prompts, text_as="lines", table=options)
    prompts = take_in_turn(prompts, [prompt.category for prompt in prompts], options.num_prompts)
    num_cut = sum(prompt.num_turns > 1 for prompt in prompts)
    if num_cut:
        note(f"{num_cut} of {len(prompts)} prompts have several turns; the first one is used")
    if ignored := sorted({name for prompt in prompts for name in prompt.settings}):
        note(
            "settings of single prompts are not used here, which would time other work: "
            f"{', '.join(ignored)}"
        )
    target, tokenizer, draft_arguments = load_pair(options)
    token_ids = encode_rows(prompts, tokenizer, is_chat=options.chat)
    categories, pad_token_id = (
        [prompt.category for prompt in prompts],
        cast(int, tokenizer.pad_token_id),
    )
    batches = make_batches(token_ids, categories, pad_token_id, options.batch_size, target.device)
    dtype = str(target.dtype).removeprefix("torch.")
    where = {
        **environment(target.device),
        "dtype": dtype,
        "target": options.target,
        "draft": options.draft,
    }
    logging.set_verbosity_error()  # warnings would break the progress bar
    run_settings = {
        "batch_size": options.batch_size,
        "prompts": str(options.prompts),
        "fields": fields,
    }
    result = {"environment": where, "settings": decoding.plain | run_settings}
    return Decoder(target, draft_arguments, decoding.plain), batches, result


@contextmanager
def progress(
    num_steps: int, log: Console | None = None
) -> Iterator[Callable[[Method, Run | None], None]]:
    """Show the progress of `num_steps` calls; yield a function to call after each of them."""
    log = log or notes()
    steps, bar = itertools.count(1), ProgressNotes(log, "warming up")

    def on_step(method: Method, run: Run | None) -> None:
        num_done = next(steps)
        name, numbers = f"warming up: {method.name}", ""
        if run is not None:
            name, numbers = method.name, f"{run.tokens_per_s:.0f} tokens/s"
            if run.stats is not None:
                numbers += f", {run.stats.acceptance_rate:.0%} accepted"
        if log.is_terminal and num_done >= num_steps:
            numbers += "; comparing outputs"  # the comparison takes time after the last call
        bar.show(num_done, num_steps, name, numbers)

    with bar.bar:
        yield on_step


def _show_comparison(result: dict[str, Any]) -> None:
    settings, where, entries = result["settings"], result["environment"], result["methods"]
    num_prompts = counted(settings["num_prompts"], "prompt")
    note(
        f"{where['device']}, {counted(where['threads'], 'thread')}, {where['dtype']}, "
        f"{num_prompts} in "
        f"batches of {settings['batch_size']}, "
        f"{'sampling' if settings['do_sample'] else 'greedy'}; "
        "medians (minimum to maximum) over batches"
    )
    if settings["counted"]:
        note(f"counted: {settings['counted']}")
    name_column = {"method": field("name")}
    # Short cells fit narrow terminals.
    short_columns = name_column | {
        "tokens/s": lambda entry: f"{entry['tokens_per_s']['median']:.0f}",
        "speed-up": lambda entry: METHODS["speed-up"](entry).replace(" to ", "-"),
    }
    columns = {
        head: cell for head, cell in (METHODS | short_columns).items() if head not in _HIDDEN
    }
    _show("speed", {_SHORT.get(head, head): cell for head, cell in columns.items()}, entries, 2)
    by_check: dict[str, list[str]] = {}
    for entry in entries:
        if entry["checked"]:
            by_check.setdefault(entry["checked"], []).append(entry["name"])
    for outcome, names in by_check.items():
        answer(f"compared with plain decoding: {outcome}: {'; '.join(names)}\n")
    noise = [
        f"{entry['name']} ({entry['speedup_bound']:.2f})" for entry in entries if entry["is_noise"]
    ]
    if noise:
        answer(f"noise: the speed-up is above the bound of the pair: {'; '.join(noise)}\n")
    _show("latency", values.LATENCIES | name_column, entries, 1)
    _show(
        "by category",
        values.CATEGORIES,
        sorted(result["categories"], key=lambda entry: str(entry["category"])),
        2,
    )
    _show("drift of lossy verifiers", values.DRIFT, result["drift"], 1)
    for name, reason in settings["left_out"].items():
        note(f"left out: {name}: {reason}", style="bold")


def _show_trials(result: dict[str, Any], rule: Rule) -> None:
    columns = {
        "method": field("name"),
        "prompts": field("num_prompts"),
        "of equal texts": field("num_counted"),
        "tokens/s": values.tokens_per_s,
        "speed-up": field("speedup", 2),
        "accepted": values.share("acceptance_rate"),
        **(
            {}
            if rule.is_exact
            else {"agreement": values.share("agreement_with_greedy"), "drop": field("drop", 3)}
        ),
        "result": lambda trial: (
            trial["out"] or ("best" if trial["name"] == result["winner"] else MISSING)
        ),
    }
    _show(f"methods tried with quality: {rule}", columns, result["tried"], 1)


def _show(title: str, columns: Columns, entries: Sequence[Result], num_names: int) -> None:
    """Print a table with right-aligned numbers if there are entries."""
    table = values.make_table(title, "", columns, entries, num_names)
    if table is None:
        return
    rich_table = rich.table.Table(
        title=table.title, caption=table.note, box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    rich_table.title_justify, rich_table.title_style, rich_table.caption_justify = (
        "left",
        "bold",
        "left",
    )
    for index, (head, column) in enumerate(
        zip(table.head, zip(*table.lines, strict=True), strict=True)
    ):
        is_number = all(cell == MISSING or cell.lstrip("-")[:1].isdigit() for cell in column)
        justify: Literal["left", "right"] = (
            "right" if is_number and index >= table.num_names else "left"
        )
        rich_table.add_column(head, justify=justify, overflow="fold", no_wrap=index == 0)
    for line in table.lines:
        rich_table.add_row(*line)
    output = Console(highlight=False, markup=False)
    if not output.is_terminal:
        output.width = _PIPED_WIDTH
    output.print(rich_table)


def _finish(
    result: dict[str, Any], options: Measurement, show: Callable[[dict[str, Any]], None]
) -> None:
    """Show the results and doubts about them, then write them as JSON.

    The results are shown first, because writing may fail.
    """
    if not options.as_json:
        show(result)
    for reason in result["reliability"]["reasons"]:
        note(f"warning: {reason}", style="bold yellow")
    if result["is_interrupted"]:
        note("interrupted: the results cover the calls so far", style="bold")
    if options.as_json:
        answer(json.dumps(result, indent=1))
    if options.output is not None:
        write_json(options.output, result)
