"""Draft heads that calls name by folder or id, loaded once for a target."""

import threading
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_speculate.draft.heads.head import DraftHead
from hf_speculate.draft.heads.load import load_drafter
from hf_speculate.models.language_model import device_of


class HeadStore:
    """The draft heads that calls of one target named, by source, dtype and device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heads: dict[tuple[str, torch.dtype, torch.device], DraftHead] = {}

    def get(self, source: str | Path, target: PreTrainedModel) -> DraftHead:
        """The head of a folder or a Hub repository, loaded by `load_drafter` on first use.

        Args:
            source: a folder, or the id of a Hub repository.
            target: the model that the head was trained for.

        Raises:
            ConfigError: see `load_drafter`.
            UnsupportedModelError: see `load_drafter`.
        """
        key = (str(source), target.dtype, device_of(target))
        with self._lock:
            if key not in self._heads:
                self._heads[key] = load_drafter(source, target)
            return self._heads[key]
