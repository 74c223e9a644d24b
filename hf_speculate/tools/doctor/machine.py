"""The devices of this machine and what is installed, as a process of its own sees them."""

import platform
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hf_speculate.kernels.backends import runs_kernels
from hf_speculate.options.verdicts.verdict import device_key, package_version
from hf_speculate.tools.doctor.catalogue import names_for


class DeviceDescription(NamedTuple):
    """One device."""

    name: str  # as torch calls it, "cuda:0" for example
    title: str
    facts: dict[str, Any]
    key: dict[str, str]  # key of its verdict
    checks: list[str]


class Machine(NamedTuple):
    """What is installed, and the devices."""

    versions: dict[str, str]
    devices: list[DeviceDescription]


def describe(compiles: bool) -> Machine:
    """What there is; touches every device."""
    return Machine(_versions(), [_describe(device, compiles) for device in _devices()])


def _versions() -> dict[str, str]:
    names = ("torch", "triton", "transformers", "accelerate", "peft")
    versions = {name: package_version(name) for name in names}
    cudnn: Callable[[], int | None] = torch.backends.cudnn.version
    all_versions = {
        "hf_speculate": package_version("hf-speculate") or "not installed",
        **versions,
        "python": platform.python_version(),
        "cuda": str(torch.version.cuda or ""),
        "hip": str(torch.version.hip or ""),
        "cudnn": str(cudnn() or "") if torch.version.cuda else "",
        "system": f"{platform.system()} {platform.machine()}",
    }
    return {name: value for name, value in all_versions.items() if value}


def _devices() -> list[torch.device]:
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if not torch.cuda.is_available():
        devices = []
    xpu = getattr(torch, "xpu", None)
    if xpu is not None and xpu.is_available():
        devices += [torch.device("xpu", index) for index in range(xpu.device_count())]
    if torch.backends.mps.is_available():
        devices.append(torch.device("mps"))
    return [*devices, torch.device("cpu")]


def _describe(device: torch.device, compiles: bool) -> DeviceDescription:
    title = platform.processor() or platform.machine()
    facts: dict[str, Any] = {}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        properties = torch.cuda.get_device_properties(device)
        title = properties.name
        facts = {
            "capability": f"{properties.major}.{properties.minor}",
            "free_gb": round(free / 1e9, 1),
            "total_gb": round(total / 1e9, 1),
        }
    elif device.type == "cpu":
        facts = {"threads": torch.get_num_threads()}
    key = device_key(device)
    if key.get("driver"):
        facts["driver"] = key["driver"]
    names = names_for(device.type, compiles=compiles, has_kernels=runs_kernels("auto", device))
    return DeviceDescription(str(device), title, facts, key, names)
