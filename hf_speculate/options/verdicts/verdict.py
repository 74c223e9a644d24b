"""Device verdicts: what `hf-speculate doctor` saw on a device, kept in a file that later calls read."""

import hashlib
import json
import os
import platform
import re
import stat
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

RIGHT, WRONG, CRASHED = "right", "wrong", "crashed"  # what the file says of a test
KERNELS, GRAPHS = "kernels", "graphs"  # kinds of tests; a test is named "<kind>: <what>"
COMMAND = "`hf-speculate doctor`"

# Files and folders of the package whose code a verdict is about.
CODE = (
    "kernels",
    "cache",
    "models/folded_attention.py",
    "options/compiled",
    "options/cuda/attention_backends.py",
    "options/heads/layer_capture.py",
    "draft/model.py",
    "draft/token_choice.py",
)
_DRIVER = Path("/proc/driver/nvidia/version")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Verdict(NamedTuple):
    """The verdict on a device: the result of each test."""

    results: Mapping[str, str]

    def of(self, test: str) -> str | None:
        """The worst result of the tests of a kind; None if none of them was run."""
        seen = {result for name, result in self.results.items() if name.partition(":")[0] == test}
        return next((result for result in (CRASHED, WRONG, RIGHT) if result in seen), None)


def read_verdict(device: torch.device) -> Verdict | None:
    """The verdict on a device with what is installed now; None if there is none that can be trusted."""
    key = device_key(device)
    try:
        descriptor = os.open(verdict_path(key), os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(descriptor, encoding="utf-8") as file:
            return _verdict_of(json.load(file), key) if _is_own(os.fstat(descriptor)) else None
    except (OSError, ValueError):
        return None


def _verdict_of(content: Any, key: Mapping[str, str]) -> Verdict | None:
    if not isinstance(content, dict) or content.get("key") != key or not isinstance(content.get("results"), dict):
        return None
    return Verdict(content["results"])


def _is_own(status: os.stat_result) -> bool:
    """Whether a file is this user's, and nobody else can write it."""
    is_mine = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
    return is_mine and not (os.name == "posix" and status.st_mode & _OTHERS_WRITE)


def verdict_path(key: Mapping[str, str]) -> Path:
    """The file of a key; each key has a file of its own, so that several doctors write without a lock."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf_speculate" / "verdicts"
    digest = hashlib.sha256(json.dumps(dict(sorted(key.items()))).encode()).hexdigest()
    return folder / f"{digest[:24]}.json"


def device_key(device: torch.device) -> dict[str, str]:
    """The key of a verdict: the device, the driver, versions and a hash of our code."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return {**_hardware(device), **_software()}


def _hardware(device: torch.device) -> dict[str, str]:
    if device.type != "cuda":
        return {"device": device.type, "name": platform.processor() or platform.machine()}
    properties = torch.cuda.get_device_properties(device)  # whose name ends with the profile of a MIG slice
    return {
        "device": device.type,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "driver": _driver(),
    }


@cache
def _driver() -> str:
    """The version of the kernel's driver; empty if the system does not say."""
    try:
        match = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER.read_text(encoding="utf-8"))
    except OSError:
        return ""
    return match.group() if match else ""


@cache
def _software() -> dict[str, str]:
    names = ("torch", "triton", "transformers")
    return {**{name: package_version(name) for name in names}, "code": code_hash(Path(__file__).parents[2])}


def package_version(name: str) -> str:
    """The version of a package; empty if it is not installed."""
    if name == "torch":
        return str(torch.__version__)  # with the build, which the package's metadata may lack
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def code_hash(package: Path) -> str:
    """Hash of the code that a verdict is about, in the folder of our package."""
    digest = hashlib.sha256()
    for name in CODE:
        path = package / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if file.is_file():
                digest.update(f"{file.relative_to(package).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:24]
