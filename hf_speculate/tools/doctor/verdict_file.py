"""Writes the verdict file of a device, which `hf_speculate.options.verdicts.verdict` reads."""

import json
from collections.abc import Mapping
from pathlib import Path

from hf_speculate.options.verdicts.verdict import verdict_path
from hf_speculate.tools.atomic_file import replace_file

OWNER_ONLY_FOLDER, OWNER_ONLY = 0o700, 0o600


def write_verdict(key: Mapping[str, str], results: Mapping[str, str]) -> Path:
    """Replace the verdict of a key; other users can neither read nor write it.

    Raises:
        OSError: the folder cannot be written.
    """
    path = verdict_path(key)
    path.parent.mkdir(mode=OWNER_ONLY_FOLDER, parents=True, exist_ok=True)
    content = json.dumps({"key": dict(key), "results": dict(results)}, indent=1)
    replace_file(path, [content.encode(), b"\n"], mode=OWNER_ONLY)
    return path
