"""Imports libraries that only some features need."""

import importlib
from typing import Any

from hf_speculate.errors import MissingExtraError


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
