"""Print answers to standard output, and notes to standard error."""

import json
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.text import Text

from hf_speculate.tools.atomic_file import replace_file
from hf_speculate.tools.cli.option_names import option_line

# exit statuses; 130 is 128 plus the number of SIGINT
OK, REFUSED, WRONG_USE, INTERRUPTED = 0, 1, 2, 130


def notes(is_quiet: bool = False) -> Console:
    """Make a console for progress and notes on standard error, without markup."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False, quiet=is_quiet)


def note(text: str, style: str = "dim") -> None:
    notes().print(text, style=style, soft_wrap=True)


class _TwoLines(Progress):
    """Progress bar with a line of text below it, which a narrow terminal cuts."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            line = f"{task.description} {task.fields['numbers']}".rstrip()
            yield Text(line, no_wrap=True, overflow="ellipsis")


class ProgressNotes:
    """Progress as a bar or as lines.

    A terminal shows a bar. Other outputs get at most one line per `every_s` seconds.
    """

    def __init__(
        self,
        log: Console,
        task: str,
        every_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self.bar = _TwoLines(*columns, console=log, transient=True, disable=not log.is_terminal)
        self._task = self.bar.add_task(task, total=None, numbers="")
        self._log, self._every_s, self._clock = log, every_s, clock
        self._shown_s = clock()

    def show(self, num_done: int, num: int, task: str, numbers: str) -> None:
        self.bar.update(
            self._task, completed=num_done, total=num, description=task, numbers=numbers
        )
        if not self._log.is_terminal and self._clock() - self._shown_s >= self._every_s:
            self._shown_s = self._clock()
            line = f"{num_done}/{num} {task} {numbers}".rstrip()
            self._log.print(line, style="dim", markup=False, soft_wrap=True)


def answer(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def error_line(error: Exception, hint: str = "") -> str:
    """Describe an error in one line; for unexpected errors, include the type and the `hint`."""
    # typer's error for an unknown option
    if hasattr(error, "possibilities") and hasattr(error, "option_name"):
        return option_line(error)
    format_message = getattr(error, "format_message", None)  # an error from typer or click
    if callable(format_message):
        return " ".join(str(format_message()).split())
    error_name, line = type(error).__name__, first_line(error)
    expected = pkgutil.resolve_name("hf_speculate.errors:SpeculateError")  # imports torch
    if isinstance(error, OSError | expected):
        return line or error_name
    return (f"{error_name}: {line}" if line else error_name) + (f" ({hint})" if hint else "")


def write_json(path: Path, result: dict[str, Any]) -> None:
    replace_file(path, [json.dumps(result, indent=1).encode(), b"\n"])
