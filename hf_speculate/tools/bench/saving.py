"""Writes fields into a `generation_config.json`, keeping its other entries."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig

from hf_speculate.errors import ConfigError
from hf_speculate.tools.atomic_file import replace_file
from hf_speculate.tools.bench.methods import DraftLen

FILE = "generation_config.json"
# Fields that tuning sets. Old values of these are removed.
TUNED_NAMES = {*DraftLen(1, False).fields, "posterior_alpha", "posterior_threshold", "verifier"}
_FROM_MODEL = "_from_model_config"  # if set, transformers drops unknown fields


def settings_in(folder: Path) -> dict[str, Any]:
    """Entries of a folder's generation config, or those that transformers derives from its model config."""
    path = folder / FILE
    if not path.is_file():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"the folder of --write must hold a generation_config.json or a model's config.json, got {folder}; "
                "name the target's folder, or leave --write out to print the fields only"
            )
        return dict(GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder)).to_diff_dict())
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path} must be a JSON object, got another content ({error}); repair the file") from error


def write_fields(folder: Path, fields: Mapping[str, Any]) -> Path:
    """Write fields of `SpeculationConfig` into the folder's generation config and return the file.

    Other entries are kept. The file is replaced atomically.
    """
    settings = {name: value for name, value in settings_in(folder).items() if name not in TUNED_NAMES}
    settings.pop(_FROM_MODEL, None)
    path = folder / FILE
    replace_file(path, [json.dumps(settings | dict(fields), indent=2, sort_keys=True).encode(), b"\n"])
    return path
