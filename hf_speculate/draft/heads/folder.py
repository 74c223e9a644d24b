"""Reads a draft head's folder or Hub repository: `config.json` and the weights."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from safetensors import safe_open
from torch import Tensor

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
        ConfigError: there is no `config.json`, or it does not hold an object.
    """

    def __init__(self, source: str | Path):
        self.source = str(source)
        self.is_local = Path(source).is_dir()
        self.config = self._read_config()

    @property
    def name(self) -> str:
        """The last part of the folder's path or of the repository's id."""
        return Path(self.source).resolve().name if self.is_local else self.source.rpartition("/")[2]

    @cached_property
    def path(self) -> Path:
        if self.is_local:
            return Path(self.source)
        return Path(snapshot_download(self.source, allow_patterns=_WEIGHT_PATTERNS))

    @cached_property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight by its name in the file; safetensors files are not read beyond their headers."""
        if not all(path.suffix == ".safetensors" for path in self.weight_files):
            return {name: tuple(weight.shape) for name, weight in self.weights.items()}
        shapes: dict[str, tuple[int, ...]] = {}
        for path in self.weight_files:
            with safe_open(path, framework="pt", device="cpu") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}
        return shapes

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """All weights on the CPU, by their names in the file."""
        return self.weights_under("")

    def weights_under(self, prefix: str) -> dict[str, Tensor]:
        """The weights whose names begin with a prefix, on the CPU; others in safetensors files are not read."""
        weights: dict[str, Tensor] = {}
        for path in self.weight_files:
            weights |= _read(path, prefix)
        return weights

    @cached_property
    def weight_files(self) -> list[Path]:
        name = next((name for name in _WEIGHT_FILES if (self.path / name).is_file()), None)
        if name is None:
            raise UnsupportedModelError(
                f"{self.source} must hold one of {', '.join(_WEIGHT_FILES)}, got "
                f"{sorted(path.name for path in self.path.iterdir())}; save the weights in one of these files"
            )
        if not name.endswith(".index.json"):
            return [self.path / name]
        shards = json.loads((self.path / name).read_text(encoding="utf-8"))["weight_map"].values()
        return [self.path / shard for shard in dict.fromkeys(shards)]

    def _read_config(self) -> dict[str, Any]:
        try:
            local = Path(self.source) / "config.json"
            path = local if self.is_local else Path(hf_hub_download(self.source, "config.json"))
        except (OSError, ValueError) as error:  # whatever the Hub, the network or the id is to blame for
            raise ConfigError(
                f"a draft head must be a folder or a Hub repository with a config.json, got {self.source!r}; check the "
                f"path or the id ({type(error).__name__}: {error})"
            ) from error
        if not path.is_file():
            raise ConfigError(f"a draft head must have a config.json, got the folder {self.source!r}; check the path")
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ConfigError(
                f"config.json of {self.source} must hold an object, got {type(config).__name__}; check the file"
            )
        return config


def _read(path: Path, prefix: str) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in list(file.keys()) if name.startswith(prefix)}
    loaded: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return {name: weight for name, weight in loaded.items() if name.startswith(prefix)}
