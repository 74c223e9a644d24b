"""Reads a draft head's folder or Hub repository: `config.json` and the weights."""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from hf_speculate.draft.heads.kinds import check_weight_names
from hf_speculate.errors import ConfigError, UnsupportedModelError

_WEIGHT_PATTERNS = ["*.safetensors", "*.bin", "*.index.json"]
# The first that exists is read.
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


class HeadFolder:
    """A draft head in a folder or a Hub repository. Weights are downloaded only when they are needed.

    Raises:
        ConfigError: there is no `config.json`, or it is no JSON object.
    """

    def __init__(self, source: str | Path):
        self.source = str(source)
        self.config: dict[str, Any] = {}
        reason = None
        try:
            self.config, _ = PreTrainedConfig.get_config_dict(source)
        except (OSError, TypeError, ValueError) as error:  # whatever the Hub, the network or the id is to blame for
            reason = error
        if not self.config or not isinstance(self.config, dict):
            raise ConfigError(
                f"a draft head must be a folder or a Hub repository with a config.json, got {self.source!r}; check the "
                f"path or the id ({reason or 'the folder has none'})"
            ) from reason

    @property
    def name(self) -> str:
        """The last part of the folder's path or of the repository's id."""
        return Path(self.source).resolve().name if Path(self.source).is_dir() else self.source.rpartition("/")[2]

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        """The weights whose names begin with a prefix, on the CPU, by their names in the file.

        Safetensors files are mapped into memory: what is not used of them is not read. Quantised weights raise an
        `UnsupportedModelError`.
        """
        weights: dict[str, Tensor] = {}
        for path in self._weight_files():
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt", device="cpu") as file:
                    weights |= {name: file.get_tensor(name) for name in list(file.keys()) if name.startswith(prefix)}
            else:
                loaded = torch.load(path, map_location="cpu", weights_only=True)
                weights |= {name: weight for name, weight in loaded.items() if name.startswith(prefix)}
        check_weight_names(weights)
        return weights

    def _weight_files(self) -> list[Path]:
        folder = Path(self.source)
        if not folder.is_dir():
            folder = Path(snapshot_download(self.source, allow_patterns=_WEIGHT_PATTERNS))
        path = next((folder / name for name in _WEIGHT_FILES if (folder / name).is_file()), None)
        if path is None:
            raise UnsupportedModelError(
                f"{self.source} must hold one of {', '.join(_WEIGHT_FILES)}, got "
                f"{sorted(path.name for path in folder.iterdir())}; save the weights in one of these files"
            )
        if not path.name.endswith(".index.json"):
            return [path]
        shards = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / shard for shard in dict.fromkeys(shards)]
