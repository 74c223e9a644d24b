"""Read the weight files in a folder; errors name the damaged or missing file."""

import json
import zipfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_speculate.errors import ConfigError, UnsupportedModelError, shown

PATTERNS = ["*.safetensors", "*.bin", "*.index.json"]
_FIRST_FILES = (  # in order of preference
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def first_file(folder: Path) -> Path:
    """Return the file with all weights, or their index.

    Raises:
        UnsupportedModelError: the folder has no such file.
    """
    path = next((folder / name for name in _FIRST_FILES if (folder / name).is_file()), None)
    if path is None:
        names = sorted(path.name for path in folder.iterdir())
        raise UnsupportedModelError(
            f"{folder} must hold one of {', '.join(_FIRST_FILES)}, got {names}; save the weights "
            "in one of these files"
        )
    return path


def read_weights(folder: Path, is_wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Read the wanted weights into CPU memory, keyed by their names in the files.

    With an index, only files with wanted weights are read.

    Raises:
        ConfigError: a file is damaged, or a file in the index is missing or lacks weights.
        UnsupportedModelError: there are no weights.
    """
    return {
        name: weight
        for file in _read_files(folder, is_wanted)
        for name, weight in file.weights.items()
    }


def read_names(folder: Path) -> set[str]:
    """Read the names of the weights in the files; raise the same errors as `read_weights`."""
    return {name for file in _read_files(folder) for name in file.names}


class _File(NamedTuple):
    names: Collection[str]  # every weight's name
    weights: dict[str, Tensor]  # only wanted weights


def _read_files(folder: Path, is_wanted: Callable[[str], bool] | None = None) -> Iterator[_File]:
    """Read the files with wanted weights; without `is_wanted`, read only names, from all files."""
    for path, listed in _listed_files(first_file(folder)).items():
        if is_wanted is not None and listed and not any(map(is_wanted, listed)):
            continue
        read = _read_safetensors if path.suffix == ".safetensors" else _read_pickle
        file = read(path, is_wanted or (lambda name: False))
        lacking = set(listed) - set(file.names)
        if lacking:
            raise ConfigError(
                f"{path} must hold the weights that its index lists, got none of {shown(lacking)}; "
                "download or save "
                "the files again"
            )
        yield file


def _listed_files(path: Path) -> dict[Path, list[str]]:
    """Return the weight files of a folder, each with its weights' names in the index."""
    if not path.name.endswith(".index.json"):
        return {path: []}
    try:
        index = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:  # not JSON, or not text
        raise _damaged(path, error) from error
    names = index.get("weight_map") if isinstance(index, dict) else None
    if (
        not isinstance(names, dict)
        or not names
        or not all(isinstance(shard, str) for shard in names.values())
    ):
        got = (
            f"one with {shown(list(index))}"
            if isinstance(index, dict) and index
            else f"{type(index).__name__}"
        )
        raise ConfigError(
            f"{path} must be an index whose weight_map names the file of every weight, got {got}; "
            "download or save the "
            "files again"
        )
    files: dict[Path, list[str]] = {}
    for name, shard in names.items():
        files.setdefault(path.parent / shard, []).append(name)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(
            f"{path} must name files that lie beside it, got {shown(missing)}, which are not "
            "there; download or save "
            "the files again"
        )
    return files


def _read_safetensors(path: Path, is_wanted: Callable[[str], bool]) -> _File:
    """Read the wanted weights, mapped into memory; other weights are not read."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = list(file.keys())
            return _File(names, {name: file.get_tensor(name) for name in names if is_wanted(name)})
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from error


def _read_pickle(path: Path, is_wanted: Callable[[str], bool]) -> _File:
    """Read the wanted weights without running code from the file.

    Weights are mapped into memory, except for files saved by torch before 1.6.
    """
    try:
        loaded: Any = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except Exception as error:  # a damaged pickle may raise anything
        raise _damaged(path, error) from error
    if not isinstance(loaded, dict) or not all(
        isinstance(weight, Tensor) for weight in loaded.values()
    ):
        raise ConfigError(
            f"{path} must hold tensors by name, got {type(loaded).__name__}; save the state_dict "
            "of the head"
        )
    return _File(
        loaded.keys(), {name: weight for name, weight in loaded.items() if is_wanted(name)}
    )


def _damaged(path: Path, error: Exception) -> ConfigError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ConfigError(
        f"{path} must be a whole file of weights or their index, got {path.stat().st_size} bytes "
        "that cannot be read "
        f"({reason}); download or save it again"
    )
