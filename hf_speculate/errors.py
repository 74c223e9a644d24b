"""Errors and warnings of the library, and imports of optional libraries."""

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

_NUM_NAMED = 3  # maximum number of names in an error
_NEAR = 0.8  # minimum similarity of a mistyped name, in [0, 1]
# Packages that may lie on the stack between user code and a warning.
_ON_THE_WAY = ("hf_speculate", "transformers", "torch", "peft", "contextlib")


class UnsupportedModelError(SpeculateError, TypeError, ValueError):
    """Error for an unsupported model, for example a model whose cache cannot be rolled back.

    The error is also a `ValueError`, because transformers raises a `ValueError` for an unsuitable
    assistant.
    """


class UnsupportedGenerationError(SpeculateError, ValueError):
    """Error for arguments that speculative decoding does not support."""


class MissingExtraError(SpeculateError, ImportError):
    """Error for a missing optional library."""


class BadLogitsError(SpeculateError, RuntimeError):
    """Error for logits that define no distribution.

    They contain NaN or +inf, or consist only of -inf.
    """


class OtherRankError(SpeculateError, RuntimeError):
    """Error for a failure on another rank.

    It ends a distributed call in all processes.
    """


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points to user code, outside the library and transformers."""
    frame, level = sys._getframe(), 1
    while (
        frame.f_back is not None
        and frame.f_globals.get("__name__", "").partition(".")[0] in _ON_THE_WAY
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: "1 row", "2 rows"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# Names in other libraries -> ours.
_ALIASES = {
    "assistant": "assistant_model",
    "draft": "assistant_model",
    "draft_model": "assistant_model",
    "num_draft_tokens": "num_assistant_tokens",
    "num_speculative_tokens": "num_assistant_tokens",
    "typical_threshold": "posterior_threshold",
}


def shown(names: Collection[str]) -> str:
    """List the first three names and count the rest."""
    first = ", ".join(sorted(names)[:_NUM_NAMED])
    return first if len(names) <= _NUM_NAMED else f"{first} and {len(names) - _NUM_NAMED} more"


def nearest_name(name: str, names: Collection[str]) -> str | None:
    """Return the closest name to a mistyped one; None if no name is similar."""
    if _ALIASES.get(name) in names:
        return _ALIASES[name]
    return next(iter(difflib.get_close_matches(name, sorted(names), n=1, cutoff=_NEAR)), None)


def import_extra(name: str, extra: str) -> Any:
    """Import a module from a library that an extra of this package installs.

    Args:
        name: Name of the module.
        extra: Extra that installs the library and its requirements.

    Raises:
        MissingExtraError: The library is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f"{name.partition('.')[0]} must be installed for this, got none; run pip install "
            f'"hf-speculate[{extra}]", '
            f'or pip install ".[{extra}]" in a clone of hf_speculate'
        ) from error
