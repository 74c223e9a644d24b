"""Errors and warnings of the library, and the import of libraries that only some features need."""

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
    """A number of things in words: "1 row", "2 rows"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shown(names: Collection[str]) -> str:
    """The first of some names, and how many more there are."""
    first = ", ".join(sorted(names)[:_NUM_NAMED])
    return first if len(names) <= _NUM_NAMED else f"{first} and {len(names) - _NUM_NAMED} more"


def import_extra(name: str, extra: str, package: str | None = None) -> Any:
    """Import a module that an extra of this package installs; `package` is what pip calls it if not by its name."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        library = name.partition(".")[0]
        raise MissingExtraError(
            f'{library} must be installed for this, got none; run pip install "{package or library}", or '
            f'pip install ".[{extra}]" in a clone of hf_speculate'
        ) from error
