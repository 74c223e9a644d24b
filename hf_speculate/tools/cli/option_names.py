"""Suggest one of our options for an unknown option."""

import pkgutil
from collections.abc import Collection, Sequence
from typing import Any

# Names in `generate()` and in other programs -> our options.
_SAME = {
    "--assistant": "--draft",
    "--assistant-model": "--draft",
    "--draft-model": "--draft",
    "--speculative-model": "--draft",
    "--prompt-lookup": "--lookup",
    "--prompt-lookup-num-tokens": "--lookup",
    "--draft-length": "--num-assistant-tokens",
    "--num-draft-tokens": "--num-assistant-tokens",
    "--num-speculative-tokens": "--num-assistant-tokens",
    "--max-num-seqs": "--rows",
    "--batch-size": "--rows",
    "--max-tokens": "--max-new-tokens",
    "--torch-dtype": "--dtype",
    "--suffix-store": "--store",
}


def option_line(error: Any) -> str:
    """Describe an unknown option in one line, with a suggestion if there is one."""
    name = error.option_name.replace("_", "-")
    options = (
        [option for parameter in error.ctx.command.params for option in parameter.opts]
        if error.ctx
        else []
    )
    meant = _meant(name, options, error.possibilities or ())
    return f"No such option: {error.option_name}" + (
        f"; did you mean {meant}?" if meant else "; see --help"
    )


def _meant(name: str, options: Collection[str], similar: Sequence[str]) -> str:
    if _SAME.get(name) in options:
        return _SAME[name]
    if name in options:
        return name
    if "--set" in options:
        fields = pkgutil.resolve_name("hf_speculate.tools.cli.arguments:SETTINGS")  # imports torch
        field = name.removeprefix("--").replace("-", "_")
        if field in fields:
            return f"--set {field}=VALUE"
    return " or ".join(similar)
