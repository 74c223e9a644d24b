"""Prints answers on the standard output, and notes on the standard error."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hf_speculate.tools.atomic_file import replace_file

OK, REFUSED, WRONG_USE, INTERRUPTED = 0, 1, 2, 130  # exit statuses; 130 is 128 and the number of SIGINT


def notes() -> Console:
    """Console for progress and notes, so that answers can be piped."""
    return Console(stderr=True, highlight=False)


def progress_bar(log: Console) -> Progress:
    """A bar with a description before it and the field `numbers` after it; it is only shown on a terminal."""
    description, numbers = TextColumn("{task.description}"), TextColumn("{task.fields[numbers]}")
    columns = (description, BarColumn(), MofNCompleteColumn(), numbers, TimeRemainingColumn())
    return Progress(*columns, console=log, transient=True, disable=not log.is_terminal)


def answer(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def write_json(path: Path, result: dict[str, Any]) -> None:
    replace_file(path, [json.dumps(result, indent=1).encode(), b"\n"])
