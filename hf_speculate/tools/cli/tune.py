"""`hf-speculate tune`: which settings decode a user's prompts fastest."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_speculate.errors import ConfigError
from hf_speculate.tools.bench.drift import drift_of_runs
from hf_speculate.tools.bench.equality import TextCheck
from hf_speculate.tools.bench.methods import parse_draft_lens, parse_thresholds
from hf_speculate.tools.bench.rules import Rule, parse_rule
from hf_speculate.tools.bench.saving import settings_in, write_fields
from hf_speculate.tools.bench.tuning import Instruments, Tuned, candidates, num_steps
from hf_speculate.tools.bench.tuning import tune as tune_methods
from hf_speculate.tools.cli import measuring, options
from hf_speculate.tools.cli.console import OK, REFUSED, answer, notes
from hf_speculate.tools.cli.loading import load_pair
from hf_speculate.tools.cli.measuring import show, shown

Quality = Annotated[
    str,
    typer.Option(
        "--quality",
        "-q",
        help="exact: verifiers that keep the target's law; or bounds for lossy ones between commas: agreement=0.95 "
        "(share of tokens that greedy decoding would take), drop=0.05 (nats per token).",
    ),
]
Verifiers = Annotated[str, typer.Option("--verifiers", "-v", help="Names between commas; unset: all that are allowed.")]
Write = Annotated[
    Path | None, typer.Option("--write", help="Put the fields into this model folder's generation_config.json.")
]


def tune(
    target: options.Target,
    draft: measuring.DraftModel,
    prompts: measuring.Prompts,
    quality: Quality = "exact",
    verifiers: Verifiers = "",
    num_assistant_tokens: measuring.DraftLens = "2,3,5,8,12,adaptive:5,adaptive,adaptive:16",
    thresholds: measuring.Thresholds = "0.04,0.09,0.25",
    max_new_tokens: options.MaxNewTokens = 128,
    batch_size: measuring.BatchSize = 1,
    num_prompts: measuring.NumPrompts = None,
    sample: options.Sample = False,
    temperature: options.Temperature = None,
    chat: measuring.Chat = False,
    seed: options.Seed = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    settings: options.Settings = None,
    as_json: measuring.Json = None,
    write: Write = None,
) -> None:
    """Find verifier, tokens a round and threshold for your prompts. Exit status 1: plain decoding is as fast."""
    rule = parse_rule(quality)
    fields = measuring.shared_fields(settings)
    decoding = options.decoding_from(max_new_tokens, sample, temperature)
    lens = parse_draft_lens(num_assistant_tokens)
    methods = candidates(rule, lens, parse_thresholds(thresholds), sample, fields, verifiers)
    if not methods:
        raise ConfigError(
            f"--verifiers must name one that --quality {rule} allows, got {verifiers}; "
            "leave it out, or set bounds such as agreement=0.95"
        )
    measuring.check_folder_of(as_json)
    if write is not None:
        settings_in(write)
    log = notes()
    pair = load_pair(target, draft, dtype, device, log)
    batches = measuring.encode(prompts, pair, batch_size, num_prompts, chat, log)
    decoder = measuring.decoder_of(pair, decoding)
    with measuring.progress(log, num_steps(len(methods), len(batches))) as on_step:
        check, read = TextCheck(decoder), partial(drift_of_runs, decoder.target)
        instruments = Instruments(decoder, check, read, on_step=on_step)
        tuned = tune_methods(methods, batches, rule, instruments, do_sample=sample, seed=seed or 0)
    result = tuned.as_dict()
    _show(result, rule)
    if as_json is not None:
        used = {**decoding, "batch_size": batch_size, "prompts": str(prompts), "quality": str(rule), "fields": fields}
        measuring.write_json(
            as_json, {"environment": measuring.environment_of(pair, target, draft), "settings": used, **result}
        )
    raise typer.Exit(_answer(tuned, write))


def _show(result: dict[str, Any], rule: Rule) -> None:
    heads = ["method", "prompts", "tokens/s", "over plain", "acceptance rate"]
    if not rule.is_exact:
        heads += ["agreement", "drop"]
    rows = []
    for one in result["tried"]:
        cells = [
            one["name"],
            str(one["num_prompts"]),
            shown(one["tokens_per_s"], ".0f"),
            shown(one["speedup"]),
            shown(one["acceptance_rate"], ".0%"),
        ]
        if not rule.is_exact:
            cells += [shown(one["agreement_with_greedy"], ".1%"), shown(one["drop"], ".3f")]
        rows.append([*cells, one["out"] or ("best" if one["name"] == result["winner"] else "-")])
    show(f"tried under the rule: {rule}", [*heads, "out"], rows)


def _answer(tuned: Tuned, write: Path | None) -> int:
    """Say what won and write it; returns the exit status."""
    if tuned.winner is None:
        allowed = any(not trial.complaint for trial in tuned.trials)
        why = "plain decoding is as fast as any method" if allowed else "no method keeps to the rule"
        answer(f"leave speculation out: {why}; nothing is written")
        return REFUSED
    answer(f"best: {tuned.winner.name}")
    answer(json.dumps(tuned.fields, indent=2, sort_keys=True))
    if write is not None:
        answer(f"written into {write_fields(write, tuned.fields)}")
    return OK
