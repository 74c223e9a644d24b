"""Collect the fields of `SpeculationConfig` from keywords, generation configs and saved files."""

import importlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_speculate.config import FIELD_NAMES, SpeculationConfig
from hf_speculate.errors import ConfigError

# A field also excludes its companions from weaker sources: a call that sets K tokens gets K tokens,
# whatever schedule is saved.
_SHUTS_OUT = {
    "num_assistant_tokens": "num_assistant_tokens_schedule",
    "seed": "generator",
    "generator": "seed",
}

# Fields whose value is an object -> module and name of its class, imported on use.
_OBJECTS = {
    "suffix_store": ("hf_speculate.options.sources.suffix_store", "SuffixStore"),
    "draft_state": ("hf_speculate.options.draft_state.state", "DraftState"),
}


def setting(model: PreTrainedModel, call: Mapping[str, Any], name: str) -> Any:
    """Return a field from the keywords, the passed generation config or the model's.

    A keyword of None counts as set. The result is None if no source sets the field.
    """
    if name in call:
        return call[name]
    values = (
        getattr(config, name, None)
        for config in (call.get("generation_config"), model.generation_config)
    )
    return next((value for value in values if value is not None), None)


def read_config(sources: Iterable[Mapping[str, Any]]) -> SpeculationConfig:
    """Read each field from the first source that sets it; the strongest source comes first."""
    settled: dict[str, Any] = {}
    for source in sources:
        shut_out = {excluded for name, excluded in _SHUTS_OUT.items() if name in settled}
        for name in FIELD_NAMES:
            if name in source and name not in settled and name not in shut_out:
                settled[name] = source[name]
    for name, (module, class_name) in _OBJECTS.items():
        value = settled.get(name)
        if value is not None and not isinstance(
            value, getattr(importlib.import_module(module), class_name)
        ):
            raise ConfigError(
                f"{name} must be a {class_name}, got {type(value).__name__}; pass "
                f"hf_speculate.{class_name}()"
            )
    # An explicit None excludes weaker sources and selects the default.
    return SpeculationConfig(
        **{name: value for name, value in settled.items() if value is not None}
    )


def fields_of(config: object) -> dict[str, Any]:
    """Return the fields that a `GenerationConfig` sets; `None` counts as not set."""
    values = {name: getattr(config, name, None) for name in FIELD_NAMES}
    return {name: value for name, value in values.items() if value is not None}


def fields_in(saved: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return our fields from a `generation_config.json` or its content; None counts as not set."""
    values: Any = saved or {}
    if isinstance(saved, str | Path):
        try:
            values = json.loads(Path(saved).read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError) as error:  # invalid JSON, or nested too deeply
            raise ConfigError(
                f"fields_from must be a JSON object, got {saved}: {error}; mend the file"
            ) from error
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"fields_from must be a JSON object or a mapping, got {type(values).__name__}; "
            'write {"verifier": "typical"}, say'
        )
    return {name: values[name] for name in FIELD_NAMES if values.get(name) is not None}
