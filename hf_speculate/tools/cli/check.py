"""`hf-speculate check`: checks whether a draft model or a draft head fits a target."""

import json
from typing import Any, NamedTuple

from hf_speculate.draft.heads.fit import HeadFit
from hf_speculate.draft.heads.load import check_head
from hf_speculate.errors import ConfigError, UnsupportedModelError
from hf_speculate.tools.checks.pair import PairReport, check_pair
from hf_speculate.tools.checks.sources import ModelReader
from hf_speculate.tools.cli.arguments import check_writable
from hf_speculate.tools.cli.commands import Check
from hf_speculate.tools.cli.console import OK, REFUSED, answer, write_json
from hf_speculate.tools.cli.loading import names_head


class Unsupported(NamedTuple):
    """A report on a model or a head that hf_speculate does not support with any other."""

    target: str
    draft: str
    reason: str

    @property
    def ok(self) -> bool:
        """Always False."""
        return False

    def as_dict(self) -> dict[str, Any]:
        """The report as values that JSON can hold."""
        return {**self._asdict(), "ok": False, "level": "not supported"}

    def __str__(self) -> str:
        return f"not supported: {self.draft} as a draft for {self.target}\n  not supported: {self.reason}"


def run(options: Check) -> int:
    """Print a report on a pair."""
    models = options.models
    if models.draft is None:
        raise ConfigError("--draft must name a draft model, got none; add --draft")
    check_writable(options.output)
    read: dict[str, Any] = {} if models.revision is None else {"revision": models.revision}
    if models.trust_remote_code:
        read["trust_remote_code"] = True
    dtype = None if models.dtype == "auto" else models.dtype
    report: PairReport | HeadFit | Unsupported
    try:
        if names_head(models):
            report = check_head(models.draft, ModelReader(read).config("target", models.target))
        else:
            report = check_pair(models.target, models.draft, dtype=dtype, **read)
    except UnsupportedModelError as error:
        report = Unsupported(models.target, models.draft, str(error))
    answer(json.dumps(report.as_dict(), indent=2) if options.as_json else str(report))
    if options.output is not None:
        write_json(options.output, report.as_dict())
    return OK if report.ok else REFUSED
