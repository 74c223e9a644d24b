"""`hf-speculate tune`: finds the fastest settings for given prompts."""

import json
from functools import partial
from typing import Any

from hf_speculate.errors import ConfigError
from hf_speculate.tools.bench.methods import parse_draft_lens, parse_thresholds
from hf_speculate.tools.bench.quality import Rule, TextCheck, drift_of_runs, parse_rule
from hf_speculate.tools.bench.report.values import MISSING, field, share, tokens_per_s
from hf_speculate.tools.bench.tuning import Instruments, candidates, num_steps, settings_in, tune, write_fields
from hf_speculate.tools.cli import measuring
from hf_speculate.tools.cli.arguments import decoding_of
from hf_speculate.tools.cli.console import INTERRUPTED, OK, REFUSED, answer, note
from hf_speculate.tools.cli.options import Tune


def run(options: Tune) -> int:
    write, rule, decoding = options.write, parse_rule(options.quality), decoding_of(options, max_new_tokens=128)
    fields, sample = measuring.shared_fields(decoding, options), options.sample
    lens, thresholds = parse_draft_lens(options.num_assistant_tokens), parse_thresholds(options.thresholds)
    methods = candidates(rule, lens, thresholds, sample, fields, options.verifiers or "")
    if not methods:
        raise ConfigError(
            f"--verifiers must name one that --quality {rule} allows, got {options.verifiers}; leave it out"
        )
    if write is not None:
        settings_in(write)
    setup = measuring.load(options, decoding, fields)
    decoder, batches = setup.decoder, setup.batches
    with measuring.progress(num_steps(len(methods), len(batches))) as on_step:
        instruments = Instruments(decoder, TextCheck(decoder), partial(drift_of_runs, decoder.target), on_step=on_step)
        tuned = tune(methods, batches, rule, instruments, do_sample=sample, seed=options.seed or 0)
    settings = setup.settings | {"quality": str(rule)}
    result = {"environment": setup.environment, "settings": settings, **tuned.as_dict()}
    if not options.as_json:
        _show(result, rule)
    measuring.finish(result, options)
    if tuned.is_interrupted:
        return INTERRUPTED
    say = note if options.as_json else answer
    if tuned.winner is None:
        is_allowed = any(not trial.complaint for trial in tuned.trials)
        why = "plain decoding is as fast as any method" if is_allowed else "no method has the required quality"
        say(f"do not speculate: {why}; nothing is written")
        return REFUSED
    say(f"best: {tuned.winner.name}\n{json.dumps(tuned.fields, indent=2, sort_keys=True)}")
    if write is not None:
        note(f"written to {write_fields(write, tuned.fields)}")
    return OK


def _show(result: dict[str, Any], rule: Rule) -> None:
    columns = {
        "method": field("name"),
        "prompts": field("num_prompts"),
        "tokens/s": tokens_per_s,
        "speed-up": field("speedup", 2),
        "accepted": share("acceptance_rate"),
        **({} if rule.is_exact else {"agreement": share("agreement_with_greedy"), "drop": field("drop", 3)}),
        "result": lambda one: one["out"] or ("best" if one["name"] == result["winner"] else MISSING),
    }
    measuring.show(f"methods tried with quality: {rule}", columns, result["tried"], 1)
