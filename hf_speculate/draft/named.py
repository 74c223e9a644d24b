"""Drafts named by folder or Hub id: draft heads, and ordinary models."""

import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_speculate.draft.source import VARIANTS, load_entry
from hf_speculate.errors import ConfigError, shown
from hf_speculate.model_state import model_state
from hf_speculate.models.language_model import device_of

_REASON_LEN = 200  # characters; some messages of transformers list all its models


class NamedDrafts:
    """Named drafts of one target, by source, dtype and device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._drafts: dict[tuple[str, bool, torch.dtype, torch.device], Any] = {}

    @classmethod
    def of(cls, model: nn.Module) -> "NamedDrafts":
        """Return the drafts of a target."""
        return model_state(model).get(cls, cls)

    def get(self, source: str | Path, target: PreTrainedModel, is_mtp: bool = False) -> Any:
        """Return the draft of a folder or a Hub repository; load it on first use.

        Args:
            source: the folder or repository.
            target: the target model.
            is_mtp: whether the draft consists of the target's MTP layers.

        Raises:
            ConfigError: the files do not load.
            UnsupportedModelError: it is an unsupported head, or a head of another target.
        """
        key = (str(source), is_mtp, target.dtype, device_of(target))
        with self._lock:
            if key not in self._drafts:
                head = load_entry(VARIANTS["a name"])(str(source), target, is_mtp)
                self._drafts[key] = _load_model(str(source), target) if head is None else head
            return self._drafts[key]


def _load_model(source: str, target: PreTrainedModel) -> PreTrainedModel:
    """Load an ordinary draft model, in the target's dtype and on its device.

    The command line loads draft models in the same way.
    """
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        model, info = load(
            source, dtype=target.dtype, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # unreadable files raise errors of any type
        reason = " ".join(str(error).split())[:_REASON_LEN]
        raise ConfigError(
            f"assistant_model must name a draft head or a causal language model, got {source!r}, "
            "which does not load "
            f"({reason}); check the path or the id, or load it yourself and pass the model"
        ) from error
    missing = info["missing_keys"]
    if missing:
        raise ConfigError(
            f"assistant_model must name files with all weights of {type(model).__name__}, got "
            f"{source!r} without "
            f"{shown(missing)}; download it again, or load it yourself, and pass the model"
        )
    return model.eval().to(device_of(target))  # type: ignore[no-any-return]
