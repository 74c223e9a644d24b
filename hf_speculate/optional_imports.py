"""Imports libraries that only some features need."""

import importlib
from typing import Any

from hf_speculate.errors import MissingExtraError


def import_extra(name: str, extra: str, package: str | None = None) -> Any:
    """Import a module that an extra of this package installs.

    Args:
        name: of the module.
        extra: name of the extra.
        package: name under which pip installs the module; None for the module's top-level name.

    Raises:
        MissingExtraError: the module is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        library = name.partition(".")[0]
        raise MissingExtraError(
            f'{library} must be installed for this, got none; run pip install "{package or library}", or '
            f'pip install ".[{extra}]" in a clone of hf_speculate'
        ) from error
