"""Reads the fields of a saved `generation_config.json`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_speculate.config import FIELD_NAMES
from hf_speculate.errors import ConfigError


def fields_in(saved: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields that a saved config sets; `None` counts as not set, and names that are no fields of ours do not count.

    Args:
        saved: a `generation_config.json`, or its content; None: nothing is saved.

    Raises:
        ConfigError: it holds no object.
    """
    values = _read(Path(saved)) if isinstance(saved, str | Path) else saved or {}
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"fields_from must be a JSON object or a mapping, got {type(values).__name__}; "
            'write {"verifier": "typical"}, say'
        )
    return {name: values[name] for name in FIELD_NAMES if values.get(name) is not None}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no JSON, or lists in lists without end
        raise ConfigError(f"fields_from must be a JSON object, got {path}: {error}; mend the file") from error
