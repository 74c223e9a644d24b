"""Imports libraries that only some features need."""

import importlib
from typing import Any

from hf_speculate.errors import MissingExtraError


def import_extra(name: str, extra: str) -> Any:
    """A module that an extra of ours installs.

    Args:
        name: of the module.
        extra: of ours.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        library = name.partition(".")[0]
        raise MissingExtraError(
            f'{library} must be installed for this, and is not; pip install "hf-speculate[{extra}]"'
        ) from error
