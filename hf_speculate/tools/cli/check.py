"""`hf-speculate check`: check whether a draft model or head fits a target, or a target alone."""

import json
from typing import Any

from hf_speculate.errors import UnsupportedModelError
from hf_speculate.options.heads.load import HeadFit, check_head
from hf_speculate.tools.checks.pair import PairReport, check_pair
from hf_speculate.tools.checks.sources import read_config
from hf_speculate.tools.checks.target import TargetReport, check_target
from hf_speculate.tools.cli.console import OK, REFUSED, answer, write_json
from hf_speculate.tools.cli.loading import draft_revision, names_head, with_named_target
from hf_speculate.tools.cli.options import Check


def run(options: Check) -> int:
    options = with_named_target(options)
    target, draft = options.target, options.draft
    pair = f"{draft} as a draft for {target}" if draft is not None else f"{target} as a target"
    load_options: dict[str, Any] = (
        {} if options.revision is None else {"revision": options.revision}
    )
    if options.trust_remote_code:
        load_options["trust_remote_code"] = True
    report: PairReport | HeadFit | TargetReport
    dtype = None if options.dtype == "auto" else options.dtype
    try:
        if draft is None:
            report = check_target(target, dtype=dtype, **load_options)
        elif names_head(options):
            target_config = read_config("target", target, load_options)
            report = check_head(draft, target_config, revision=draft_revision(options))
        else:
            revision = options.draft_revision
            report = check_pair(target, draft, dtype=dtype, draft_revision=revision, **load_options)
        ok, text, result = report.ok, str(report), report.as_dict()
    except UnsupportedModelError as error:  # the model or head is not supported in any pair
        ok, text = False, f"not supported: {pair}\n  not supported: {error}"
        result = {
            "target": target,
            "draft": draft,
            "reason": str(error),
            "ok": False,
            "level": "not supported",
        }
    answer(json.dumps(result, indent=2) if options.as_json else text)
    if options.output is not None:
        write_json(options.output, result)
    return OK if ok else REFUSED
