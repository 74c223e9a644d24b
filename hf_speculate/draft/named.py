"""Drafts that calls name by folder or Hub id: draft heads, and ordinary models."""

import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_speculate.draft.heads.folder import HeadFolder
from hf_speculate.draft.heads.head import DraftHead
from hf_speculate.draft.heads.load import load_head
from hf_speculate.draft.heads.recognise import is_head, is_mtp_checkpoint, text_fields
from hf_speculate.draft.heads.weight_files import shown
from hf_speculate.errors import ConfigError
from hf_speculate.model_state import model_state
from hf_speculate.models.language_model import device_of

_CALLER = 6  # frames from where a warning is given to the line that calls `generate`
_REASON_LEN = 200  # characters; some messages of transformers list all its models


class NamedDrafts:
    """The drafts that calls of one target named, by source, dtype and device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._drafts: dict[tuple[str, bool, torch.dtype, torch.device], DraftHead | PreTrainedModel] = {}

    @classmethod
    def of(cls, model: nn.Module) -> "NamedDrafts":
        """The drafts of a target."""
        return model_state(model).get(cls, cls)

    def get(self, source: str | Path, target: PreTrainedModel, is_mtp: bool = False) -> DraftHead | PreTrainedModel:
        """The draft of a folder or a Hub repository, loaded on first use; `is_mtp`: MTP layers of the target there.

        Raises:
            ConfigError: the files do not load.
            UnsupportedModelError: it is a head that is not served, or that does not fit the target.
        """
        key = (str(source), is_mtp, target.dtype, device_of(target))
        with self._lock:
            if key not in self._drafts:
                has_head = is_mtp or _names_head(source, target)
                self._drafts[key] = load_head(source, target, _CALLER) if has_head else _load_model(str(source), target)
            return self._drafts[key]


def _names_head(source: str | Path, target: PreTrainedModel) -> bool:
    """Whether a folder holds a head for the target, or is its checkpoint with MTP layers; not a draft model."""
    try:
        folder = HeadFolder(source)
    except ConfigError:
        return False  # it may hold an adapter; loading a model then says what is wrong
    config, text = folder.config, target.config.get_text_config(decoder=True)
    if is_head(config):
        return True
    if is_mtp_checkpoint(config, target.config.model_type):  # a smaller model of the family has such layers, too
        sizes = ("hidden_size", "num_hidden_layers")
        return all(text_fields(config).get(name) == getattr(text, name) for name in sizes)
    # a few early heads have the config of an ordinary model; one of the Hub is loaded as such, and lacks weights
    return Path(folder.source).is_dir() and "fc.weight" in {name.removeprefix("model.") for name in folder.names()}


def _load_model(source: str, target: PreTrainedModel) -> PreTrainedModel:
    """An ordinary draft model, as the command line loads it, in the target's dtype and on its device."""
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        model, info = load(source, dtype=target.dtype, trust_remote_code=False, output_loading_info=True)
    except Exception as error:  # of any type for unreadable files
        reason = " ".join(str(error).split())[:_REASON_LEN]
        raise ConfigError(
            f"assistant_model must name a draft head or a causal language model, got {source!r}, which does not load "
            f"({reason}); check the path or the id, or load it yourself and pass the model"
        ) from error
    missing = info["missing_keys"]
    if missing:
        raise ConfigError(
            f"assistant_model must name files with all weights of {type(model).__name__}, got {source!r} without "
            f"{shown(missing)}; download it again, or load it yourself, and pass the model"
        )
    return model.eval().to(device_of(target))  # type: ignore[no-any-return]
