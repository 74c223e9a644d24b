"""Keeps back, where the process is the command `hf-speculate`, what other packages remark on being imported."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

# torchao, which transformers imports where it is installed: its kernels for other machines, and torch on its enums.
REMARKING = ("torch.utils._pytree", "torchao")


def is_command(words: Sequence[str]) -> bool:
    """Whether a process is the command.

    Args:
        words: that the interpreter was started with, itself among them.
    """
    return any(Path(word).stem == "hf-speculate" or word == "hf_speculate.tools.cli.main" for word in words)


def keep_remarks_back() -> None:
    """Drop what these loggers say below an error; the loggers beneath them, and all others, speak as before."""
    for name in REMARKING:
        logging.getLogger(name).addFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


if is_command(sys.orig_argv):  # when this is imported: `__init__` imports transformers right after
    keep_remarks_back()
