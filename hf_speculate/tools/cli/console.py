"""Writes answers to the standard output, and all else to the standard error."""

import sys

from rich.console import Console

OK, REFUSED, WRONG_USE = 0, 1, 2  # exit statuses: 1 where the answer is no, 2 where nothing could be looked at
INTERRUPTED = 130  # as shells have it: 128 and the number of the signal


def notes() -> Console:
    """Where progress and remarks go, so that answers can be piped."""
    return Console(stderr=True, highlight=False)


def answer(text: str) -> None:
    """Write a line of the answer, as it stands."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def first_line(error: BaseException) -> str:
    """What an error says first; empty where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
