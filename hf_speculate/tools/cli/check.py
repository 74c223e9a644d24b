"""`hf-speculate check`: whether two models go together."""

import json
from typing import Annotated

import typer

from hf_speculate.tools.checks.pair import check_pair
from hf_speculate.tools.cli.console import OK, REFUSED, answer


def check(
    target: Annotated[str, typer.Argument(help="Name or path; its config and tokenizer must be on this machine.")],
    draft: Annotated[str, typer.Argument(help="The same of the draft model.")],
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON instead of text.")] = False,
) -> None:
    """Say whether a draft model goes with a target, without loading either. Exit status 1: it does not."""
    report = check_pair(target, draft)
    answer(json.dumps(report.as_dict(), indent=2) if as_json else str(report))
    raise typer.Exit(OK if report.ok else REFUSED)
