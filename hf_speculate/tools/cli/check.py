"""`hf-speculate check`: checks whether a draft model or a draft head fits a target."""

import json
from typing import Any

from hf_speculate.draft.heads.fit import HeadFit
from hf_speculate.draft.heads.load import check_head
from hf_speculate.errors import ConfigError, UnsupportedModelError
from hf_speculate.tools.checks.pair import PairReport, check_pair
from hf_speculate.tools.checks.sources import ModelReader
from hf_speculate.tools.cli.arguments import check_writable
from hf_speculate.tools.cli.commands import Check
from hf_speculate.tools.cli.console import OK, REFUSED, answer, write_json
from hf_speculate.tools.cli.loading import names_head


def run(options: Check) -> int:
    models = options.models
    if models.draft is None:
        raise ConfigError("--draft must name a draft model, got none; add --draft")
    check_writable(options.output)
    read: dict[str, Any] = {} if models.revision is None else {"revision": models.revision}
    if models.trust_remote_code:
        read["trust_remote_code"] = True
    dtype = None if models.dtype == "auto" else models.dtype
    report: PairReport | HeadFit
    try:
        if names_head(models):
            report = check_head(models.draft, ModelReader(read).config("target", models.target))
        else:
            report = check_pair(models.target, models.draft, dtype=dtype, **read)
        ok, text, result = report.ok, str(report), report.as_dict()
    except UnsupportedModelError as error:  # of a model or a head that is not supported with any other
        ok, text = False, f"not supported: {models.draft} as a draft for {models.target}\n  not supported: {error}"
        result = {"target": models.target, "draft": models.draft, "reason": str(error)}
        result |= {"ok": False, "level": "not supported"}
    answer(json.dumps(result, indent=2) if options.as_json else text)
    if options.output is not None:
        write_json(options.output, result)
    return OK if ok else REFUSED
