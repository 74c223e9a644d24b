"""Write a repository for speculative decoding: `generation_config.json` and `custom_generate`."""

import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from jinja2 import Environment, PackageLoader, StrictUndefined
from transformers import GenerationConfig, PreTrainedModel

from hf_speculate.config import FIELD_NAMES, PLAIN_NAMES, SpeculationConfig
from hf_speculate.errors import ConfigError
from hf_speculate.generation.config_sources import fields_of
from hf_speculate.generation.defaults import SAVED_ASSISTANT, TOKENIZERS, Defaults
from hf_speculate.models.text_decoder import unwrapped
from hf_speculate.verify.base import is_lossless

# A line in every card that we write. Cards without this line belong to users and are not replaced.
CARD_MARK = (
    "<!-- hf_speculate.save_config wrote this card and replaces it; remove this line to keep your "
    "changes. -->"
)
TITLES = {  # verifier -> title
    "greedy": "greedy verification",
    "rejection": "rejection sampling",
    "block": "block verification",
    "coupled": "coupled sampling",
    "typical": "typical acceptance",
}
# The versions are the minimum versions in setup.cfg. transformers checks one condition per line.
REQUIREMENTS = """\
# hf_speculate is not on a package index yet: run pip install . in a clone of its repository
hf_speculate>=0.2.0
torch>=2.6
transformers>=5.17
"""
_CARD = "README.md"
_FUNCTION = "custom_generate/generate.py"


def model_card(fields: Mapping[str, Any], name: str) -> str:
    return _render("card.md.jinja", fields, mark=CARD_MARK, name=name, meanings=_meanings())


def function_source(fields: Mapping[str, Any]) -> str:
    """Render `custom_generate/generate.py` for a repository with these fields."""
    return _render("generate.py.jinja", fields)


def _render(template: str, fields: Mapping[str, Any], **values: Any) -> str:
    verifier = fields.get("verifier") or "rejection"
    lossless = is_lossless(SpeculationConfig(verifier=verifier))
    values |= {"verifier": verifier, "title": TITLES[verifier], "is_lossless": lossless}
    values |= {"fields": sorted(fields.items())}
    environment = Environment(
        loader=PackageLoader("hf_speculate.tools.hub", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"json": json.dumps, "repr": repr}
    return environment.get_template(template).render(values)


def _meanings() -> dict[str, str]:
    """Extract the first sentence on each field from the docstring of `SpeculationConfig`."""
    arguments = (
        (inspect.getdoc(SpeculationConfig) or "").partition("Args:\n")[2].partition("\n\n")[0]
    )
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", arguments, re.M)
    return {name: " ".join(text.split()).split(". ")[0].removesuffix(".") for name, text in entries}


def save_config(
    model: PreTrainedModel | None,
    folder: str | Path,
    *,
    push_to_hub: bool = False,
    repo_id: str | None = None,
    private: bool | None = None,
    api: HfApi | None = None,
    **fields: Any,
) -> Path:
    """Write a folder with speculative settings, in the layout of the Hub.

    `generation_config.json` contains the model's generation settings and the fields, for
    `from_pretrained` and `enable`; an existing file is replaced. `custom_generate/` contains a
    function for models without `enable`. A model card is also written. A user's own card is neither
    replaced nor uploaded.

    Args:
        model: model with generation settings; it is not modified. None to write only the fields.
        folder: created if it does not exist.
        push_to_hub: whether to upload the written files.
        repo_id: name of the repository on the Hub. None for the folder's name.
        private: whether a new repository is private. None for the account's default.
        api: client for the upload. None for a new client.
        **fields: fields of `SpeculationConfig`. They override fields in the model's generation
            config.

    Returns:
        The folder.

    Raises:
        ConfigError: a field is unknown, has an invalid value, or cannot be saved.
    """
    saved = {} if model is None else fields_of(model.generation_config)
    saved |= {name: value for name, value in fields.items() if value is not None}
    _check(saved)
    folder = Path(folder)
    name = repo_id or folder.resolve().name
    (folder / _FUNCTION).parent.mkdir(parents=True, exist_ok=True)
    _write_settings(model, saved, folder)
    written = {_FUNCTION: function_source(saved), "custom_generate/requirements.txt": REQUIREMENTS}
    card = folder / _CARD
    if not card.exists() or CARD_MARK.encode() in card.read_bytes().splitlines():
        written[_CARD] = model_card(saved, name)
    for path, text in written.items():
        (folder / path).write_text(text, encoding="utf-8")
    if push_to_hub:
        api, title = api or HfApi(), "Decode speculatively with hf_speculate"
        api.create_repo(name, private=private, exist_ok=True)
        files = ["generation_config.json", *written]
        api.upload_folder(
            repo_id=name, folder_path=str(folder), allow_patterns=files, commit_message=title
        )
    return folder


def save_settings(model: PreTrainedModel, folder: str | Path) -> Path:
    """Write the arguments of `enable` into a saved model's folder.

    A model loaded from this folder needs no arguments in `enable(model)`. `generation_config.json`
    contains its generation settings, the fields, and the id of the draft; an existing file is
    replaced. For a draft model, the id is the name from which it was loaded.

    Args:
        model: an enabled model, with or without a PEFT wrapper; it is not modified.
        folder: created if it does not exist.

    Returns:
        The folder.

    Raises:
        ConfigError: `enable` had no arguments, or one of them cannot be saved; nothing is written.
        UnsupportedModelError: `model` is not a transformers model.
    """
    base, folder = unwrapped(model), Path(folder)
    defaults = dict(Defaults.of(base).values)
    if not defaults:
        raise ConfigError(
            "model must be enabled with a draft or fields to save, got none; pass them to enable()"
        )
    for name in ("speculation_stats", *TOKENIZERS):  # objects that only exist in this process
        defaults.pop(name, None)
    assistant = defaults.pop("assistant_model", None)
    saved = fields_of(base.generation_config) | defaults
    _check(saved)
    if assistant is not None:
        saved[SAVED_ASSISTANT] = _name_of(assistant)
    folder.mkdir(parents=True, exist_ok=True)
    _write_settings(base, saved, folder)
    return folder


def _name_of(assistant: Any) -> str:
    """Return the absolute folder or the Hub id of a draft."""
    if getattr(assistant, "peft_config", None) or getattr(
        assistant, "_hf_peft_config_loaded", False
    ):
        raise ConfigError(
            "assistant_model must be a model without adapters to be saved, got one with; merge "
            "them, save the "
            "merged model, and pass its folder or Hub id to enable()"
        )
    name = (
        assistant if isinstance(assistant, str | Path) else getattr(assistant, "name_or_path", "")
    )
    if not name:
        raise ConfigError(
            f"assistant_model must have a name_or_path to be saved, got {type(assistant).__name__} "
            "without; "
            "save it, and pass its folder or Hub id to enable()"
        )
    return str(Path(name).resolve()) if Path(name).exists() else str(name)


def _write_settings(model: PreTrainedModel | None, saved: Mapping[str, Any], folder: Path) -> None:
    """Write a new generation config.

    When transformers loads a config that was derived from a model config, it drops unknown fields.
    """
    settings = {} if model is None else model.generation_config.to_diff_dict()
    for name in ("_from_model_config", "transformers_version", SAVED_ASSISTANT):
        settings.pop(name, None)
    GenerationConfig(**{**settings, **saved}).save_pretrained(folder)


def _check(fields: dict[str, Any]) -> None:
    unknown = sorted(set(fields) - set(FIELD_NAMES))
    if unknown:
        hint = "set fields of transformers in model.generation_config"
        raise ConfigError(
            f"fields must be among {', '.join(PLAIN_NAMES)}, got {', '.join(unknown)}; {hint}"
        )
    for name, value in sorted(fields.items()):
        if not isinstance(value, str | int | float | list | tuple):
            raise ConfigError(
                f"{name} must be a string, a number or a list to be saved, got "
                f"{type(value).__name__}; leave it out"
            )
    SpeculationConfig(**fields)
    verifier = fields.get("verifier")
    if verifier is not None and verifier not in TITLES:
        raise ConfigError(
            f"verifier must be one of {', '.join(sorted(TITLES))} to be saved, got {verifier!r}; "
            "see examples/hub/top_k for a repository that registers a verifier of its own"
        )
