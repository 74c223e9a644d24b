"""Writes answers to the standard output, and all else to the standard error."""

import sys

from rich.console import Console

OK, REFUSED, WRONG_USE = 0, 1, 2  # exit statuses: 1 where the answer is no, 2 where nothing could be looked at


def notes() -> Console:
    """Where progress and remarks go, so that answers can be piped."""
    return Console(stderr=True, highlight=False)


def answer(text: str) -> None:
    """Write a line of the answer, as it stands."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
