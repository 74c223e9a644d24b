"""Errors and warnings of the library, and the import of libraries that only some features need."""

import difflib
import importlib
import sys
import warnings
from collections.abc import Collection
from typing import Any

from hf_speculate.kernels.errors import ConfigError as ConfigError
from hf_speculate.kernels.errors import KernelUnavailableError as KernelUnavailableError
from hf_speculate.kernels.errors import ShapeError as ShapeError
from hf_speculate.kernels.errors import SpeculateError as SpeculateError

_NUM_NAMED = 3  # names in an error
_NEAR = 0.8  # share of equal characters of a mistyped name, in [0, 1]
# packages between the user's code and a warning
_ON_THE_WAY = ("hf_speculate", "transformers", "torch", "peft", "contextlib")


class UnsupportedModelError(SpeculateError, TypeError, ValueError):
    """A model is not supported, for example because its cache cannot be rolled back.

    Also a `ValueError`, because transformers raises one for an assistant that does not fit.
    """


class UnsupportedGenerationError(SpeculateError, ValueError):
    """A combination of `generate()` arguments cannot be decoded speculatively."""


class MissingExtraError(SpeculateError, ImportError):
    """A library that only some features need is not installed."""


class BadLogitsError(SpeculateError, RuntimeError):
    """Logits define no distribution: they hold a NaN or a +inf, or only -inf."""


class OtherRankError(SpeculateError, RuntimeError):
    """Another process of a distributed call has raised an error, which ends the call in all of them."""


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's code that called the library."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _ON_THE_WAY:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def counted(number: int, noun: str) -> str:
    """Return a number of things in words: "1 row", "2 rows"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shown(names: Collection[str]) -> str:
    """Return the first of some names, and how many more there are."""
    first = ", ".join(sorted(names)[:_NUM_NAMED])
    return first if len(names) <= _NUM_NAMED else f"{first} and {len(names) - _NUM_NAMED} more"


def nearest_name(name: str, names: Collection[str]) -> str | None:
    """Return the name that a mistyped one probably stands for; None if none is near."""
    return next(iter(difflib.get_close_matches(name, sorted(names), n=1, cutoff=_NEAR)), None)


def import_extra(name: str, extra: str) -> Any:
    """Import a module of a library that an extra of this package installs.

    Raises:
        MissingExtraError: the library is not installed; the error names the extra, which brings all that it needs.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f'{name.partition(".")[0]} must be installed for this, got none; run pip install "hf-speculate[{extra}]", '
            f'or pip install ".[{extra}]" in a clone of hf_speculate'
        ) from error
