"""Writes a repository with a `generation_config.json` and a `custom_generate` function that decode speculatively."""

from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers import GenerationConfig, PreTrainedModel

from hf_speculate.config import FIELD_NAMES, PLAIN_NAMES, SpeculationConfig
from hf_speculate.errors import ConfigError
from hf_speculate.generation.config_sources import fields_of
from hf_speculate.tools.hub.card import ABOUT, CARD_MARK, DEFAULT, model_card, render

_CARD = "README.md"
_CONFIG = "generation_config.json"
_FUNCTION = "custom_generate/generate.py"
_REQUIREMENTS = "custom_generate/requirements.txt"


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

    `generation_config.json` holds the model's generation settings and the fields, for `from_pretrained` and `enable`;
    an existing file is replaced. `custom_generate/` holds a function for models that are not enabled. A model card is
    written unless the folder has one of the user's own, which is neither changed nor uploaded.

    Args:
        model: whose generation settings are included; None for none. It is not changed.
        folder: created if it does not exist.
        push_to_hub: whether to upload the written files.
        repo_id: name of the repository on the Hub; None for the folder's name.
        private: whether a new repository is private; None for the account's default.
        api: used for uploading; None for a new one.
        **fields: of `SpeculationConfig`. They override fields that the model's generation config sets.

    Returns:
        The folder.

    Raises:
        ConfigError: a field is unknown, has a wrong value or cannot be saved.
    """
    saved = {} if model is None else fields_of(model.generation_config)
    saved |= {name: value for name, value in fields.items() if value is not None}
    _check(saved)
    folder = Path(folder)
    name = repo_id or folder.resolve().name
    (folder / _FUNCTION).parent.mkdir(parents=True, exist_ok=True)
    _settings(model, saved).save_pretrained(folder)
    written = {_FUNCTION: function_source(saved), _REQUIREMENTS: "transformers>=5.17\n"}
    card = folder / _CARD
    if not card.exists() or CARD_MARK.encode() in card.read_bytes().splitlines():
        written[_CARD] = model_card(saved, name)
    for path, text in written.items():
        (folder / path).write_text(text, encoding="utf-8")
    if push_to_hub:
        api, title = api or HfApi(), "Decode speculatively with hf_speculate"
        api.create_repo(name, private=private, exist_ok=True)
        files = [_CONFIG, *written]
        api.upload_folder(repo_id=name, folder_path=str(folder), allow_patterns=files, commit_message=title)
    return folder


def function_source(fields: dict[str, Any]) -> str:
    """The content of `custom_generate/generate.py` for a repository that sets `fields`."""
    return render(
        "generate.py.jinja", title=ABOUT[fields.get("verifier") or DEFAULT].title, fields=sorted(fields.items())
    )


def _check(fields: dict[str, Any]) -> None:
    unknown = sorted(set(fields) - set(FIELD_NAMES))
    if unknown:
        hint = "set fields of transformers in model.generation_config"
        raise ConfigError(f"fields must be among {', '.join(PLAIN_NAMES)}, got {', '.join(unknown)}; {hint}")
    for name, value in sorted(fields.items()):
        if not isinstance(value, str | int | float | list | tuple):
            kind = type(value).__name__
            raise ConfigError(f"{name} must be text, a number or a list to be saved, got {kind}; pass it to generate()")
    SpeculationConfig(**fields)
    verifier = fields.get("verifier")
    if verifier is not None and verifier not in ABOUT:
        raise ConfigError(
            f"verifier must be one of {', '.join(sorted(ABOUT))} to be saved, got {verifier!r}; "
            "see examples/hub/top_k for a repository that registers a verifier of its own"
        )


def _settings(model: PreTrainedModel | None, fields: dict[str, Any]) -> GenerationConfig:
    """A new config, because one derived from a model config loses unknown fields when it is loaded."""
    settings = {} if model is None else model.generation_config.to_diff_dict()
    for name in ("_from_model_config", "transformers_version"):
        settings.pop(name, None)
    return GenerationConfig(**(settings | fields))
