"""Drafts named by a folder or Hub id: draft heads and ordinary models."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.peft_utils import find_adapter_config_file

from hf_speculate.draft.source import VARIANTS, load_entry
from hf_speculate.errors import ConfigError, shown
from hf_speculate.model_state import model_state
from hf_speculate.models.language_model import device_of

# A folder in the Hub's cache: models--owner--name/snapshots/commit.
_SNAPSHOT = re.compile(r"models--(?:[^/\\]+--)?([^/\\]+)[/\\]snapshots[/\\][^/\\]+[/\\]?$")
_HUB_ID = re.compile(r"\w[\w.-]*(?:/[\w.-]+)?")
_REASON_LEN = 200  # in characters, because some messages from transformers list all its models


class NamedDrafts:
    """Named drafts for one target, stored by source, dtype and device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._drafts: dict[tuple[str, bool, torch.dtype, torch.device], Any] = {}

    @classmethod
    def of(cls, model: nn.Module) -> "NamedDrafts":
        """Return the named drafts for a target."""
        return model_state(model).get(cls, cls)

    def get(self, source: str | Path, target: PreTrainedModel, is_mtp: bool = False) -> Any:
        """Return the draft from a folder or a Hub repository, which is loaded on first use.

        Args:
            source: the folder or repository.
            target: the target model.
            is_mtp: whether the draft consists of the target's MTP layers.

        Raises:
            ConfigError: the files cannot be loaded.
            UnsupportedModelError: the draft is an unsupported head, or a head for another target.
        """
        key = (str(source), is_mtp, target.dtype, device_of(target))
        with self._lock:
            if key not in self._drafts:
                head = load_entry(VARIANTS["a name"])(str(source), target, is_mtp)
                self._drafts[key] = _load_model(str(source), target) if head is None else head
            return self._drafts[key]


def _load_model(source: str, target: PreTrainedModel) -> PreTrainedModel:
    """Load an ordinary draft model with the target's dtype and onto its device.

    The command line loads draft models in the same way.
    """
    load: Any = AutoModelForCausalLM.from_pretrained
    base = _adapter_base(source)
    if base and is_same_checkpoint(base, str(target.name_or_path)):
        raise ConfigError(
            f"assistant_model must name a draft head or a causal language model, got {source!r}, "
            f"an adapter of the target; {_hint_of_adapter(source)}, and leave any other out"
        )
    try:
        model, info = load(
            source, dtype=target.dtype, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # unreadable files raise errors of any type
        reason = " ".join(str(error).split())[:_REASON_LEN]
        hint = "" if base is None else f"{_hint_of_adapter(source)}; "
        raise ConfigError(
            f"assistant_model must name a draft head or a causal language model, got {source!r}, "
            "which does not load "
            f"({reason}); {hint}check the path or the id, or load it yourself and pass the model"
        ) from error
    missing = info["missing_keys"]
    if missing:
        raise ConfigError(
            f"assistant_model must name files with all weights of {type(model).__name__}, got "
            f"{source!r} without "
            f"{shown(missing)}; download it again, or load it yourself, and pass the model"
        )
    return model.eval().to(device_of(target))  # type: ignore[no-any-return]


def is_same_checkpoint(name: str, other: str) -> bool:
    """Return whether two folders or Hub ids may name one checkpoint, by their last components."""
    return _last_part(name) == _last_part(other)


def is_of_hub(name: str) -> bool:
    """Return whether a name is a Hub id or a path in the Hub's cache.

    Other folders may have any name.
    """
    return bool(_SNAPSHOT.search(name) or (_HUB_ID.fullmatch(name) and not Path(name).is_dir()))


def _last_part(name: str) -> str:
    """Return the last part of a Hub id or of a folder's path, in lower case."""
    snapshot = _SNAPSHOT.search(name)
    last = snapshot[1] if snapshot else name.rstrip("/").rpartition("/")[2]
    return last.lower()


def _adapter_base(source: str) -> str | None:
    """Return the base model that an adapter's config names, "" if none; None if not an adapter."""
    try:
        path = find_adapter_config_file(source)
        fields = json.loads(Path(path).read_text(encoding="utf-8")) if path else None
    except (OSError, ValueError):  # loading the source as a model raises a better error
        return None
    return str(fields.get("base_model_name_or_path") or "") if isinstance(fields, dict) else None


def _hint_of_adapter(source: str) -> str:
    return f"pass a Uno adapter as hf_speculate.UnoAdapter({source!r})"
