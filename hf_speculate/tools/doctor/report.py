"""Report installed packages, devices and results of checks for `hf-speculate doctor`."""

import platform
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_speculate.kernels.backends import runs_kernels
from hf_speculate.tools.doctor.checks import GRAPHS, KERNELS, TEXTS, Sizes
from hf_speculate.tools.doctor.process import WRONG, Seen, run_check

# per check, including the start of its process; Triton compiles about thirty kernels on a new
# machine
LIMIT_S = 120.0
# Advice for failed checks, by name.
SETTINGS = {
    KERNELS: 'verifier_backend="torch"',
    GRAPHS: 'speculation_graphs="off"',
    TEXTS: "no assistant_model, and report it",
}
_PACKAGES = ("hf-speculate", "torch", "triton", "transformers", "accelerate", "peft")
_DRIVER = Path("/proc/driver/nvidia/version")


class Device(NamedTuple):
    """A device of this machine."""

    name: str  # name of the device in torch, for example "cuda:0"
    title: str
    facts: dict[str, Any]
    checks: Sequence[str]  # names in `CHECKS`


class DeviceReport(NamedTuple):
    """A device and the results of its checks."""

    device: Device
    seen: Sequence[Seen]

    @property
    def advice(self) -> str:
        """The settings to change; empty if all checks passed."""
        wrong = [SETTINGS[seen.name] for seen in self.seen if seen.result == WRONG]
        return f"{self.device.name}: set {', '.join(wrong)}" if wrong else ""


class DoctorReport(NamedTuple):
    """The report on all devices; `str` renders it."""

    versions: dict[str, str]
    devices: Sequence[DeviceReport]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.advice

    @property
    def advice(self) -> str:
        """The settings to change on each device with failed checks, in one line; may be empty."""
        return "; ".join(filter(None, (device.advice for device in self.devices)))

    def as_dict(self) -> dict[str, Any]:
        devices = [
            {**device._asdict(), "checks": [check._asdict() for check in seen]}
            for device, seen in self.devices
        ]
        return {"ok": self.ok, "advice": self.advice, "versions": self.versions, "devices": devices}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield ", ".join(f"{name} {value}" for name, value in self.versions.items())
        for device, seen in self.devices:
            facts = "".join(f", {name} {value}" for name, value in device.facts.items())
            yield f"\n{device.name}: {device.title}{facts}"
            yield from (
                f"  {check.result:7}  {check.name}, {check.seconds:.1f} s ({check.detail})"
                for check in seen
            )
        yield f"\n{self.advice or 'nothing is wrong'}"


def examine(
    devices: Sequence[Device] | None = None,
    *,
    sizes: Sizes | None = None,
    limit_s: float = LIMIT_S,
    enter: Callable[[], AbstractContextManager[Any]] = nullcontext,
    say: Callable[[str], object] = lambda line: None,
) -> DoctorReport:
    """Run the checks of devices.

    Args:
        devices: the devices to check. None for all devices of this machine.
        sizes: sizes of models and rounds. None for the usual sizes.
        limit_s: time limit of each check in seconds.
        enter: makes the context of a check, in the check's process.
        say: called with a description of each result.
    """
    reports = []
    for device in find_devices() if devices is None else devices:
        seen = []
        for name in device.checks:
            seen.append(run_check(name, device.name, sizes or Sizes(), limit_s, enter))
            say(f"{device.name}  {name}: {seen[-1].result}")
        reports.append(DeviceReport(device, seen))
    return DoctorReport(_versions(), reports)


def find_devices() -> list[Device]:
    """List the devices of this machine without allocating memory on them."""
    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        facts = {
            "capability": f"{properties.major}.{properties.minor}",
            "GB": round(properties.total_memory / 1e9, 1),
            **_driver(),
        }
        kernels = [KERNELS] if runs_kernels("auto", torch.device("cuda", index)) else []
        # A MIG slice counts as a device; its name ends with the profile.
        devices.append(Device(f"cuda:{index}", properties.name, facts, [*kernels, GRAPHS, TEXTS]))
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        names = [f"xpu:{index}" for index in range(torch.xpu.device_count())]
        devices += [Device(name, "Intel GPU", {}, [TEXTS]) for name in names]
    if torch.backends.mps.is_available():
        devices.append(Device("mps", "Apple GPU", {}, [TEXTS]))
    processor = platform.processor() or platform.machine()
    return [*devices, Device("cpu", processor, {"threads": torch.get_num_threads()}, [TEXTS])]


def _driver() -> dict[str, str]:
    """Return the version of the NVIDIA driver, or {} if it is unknown."""
    try:
        match = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER.read_text(encoding="utf-8"))
    except OSError:
        match = None
    return {} if match is None else {"driver": match.group()}


def _versions() -> dict[str, str]:
    versions = {name: _version(name) for name in _PACKAGES}
    others = {
        "python": platform.python_version(),
        "cuda": str(torch.version.cuda or ""),
        "hip": str(torch.version.hip or ""),
        "system": f"{platform.system()} {platform.machine()}",
    }
    return {name: value for name, value in (versions | others).items() if value}


def _version(name: str) -> str:
    if name == "torch":
        return str(torch.__version__)  # includes the build, which the package metadata may lack
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
