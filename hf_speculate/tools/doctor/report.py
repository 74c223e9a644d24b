"""The report: text that can be pasted into an issue, JSON, and what to set where something is wrong."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hf_speculate.options.verdicts.verdict import CRASHED, GRAPHS, KERNELS, RIGHT, WRONG
from hf_speculate.tools.doctor.catalogue import ATTENTION, COMPILED, TEXTS
from hf_speculate.tools.doctor.machine import DeviceDescription
from hf_speculate.tools.doctor.site import NOT_RUN
from hf_speculate.tools.doctor.worker import Seen

# What to set where a kind of check fails.
SETTINGS = {
    GRAPHS: 'speculation_graphs="off"',
    KERNELS: 'verifier_backend="torch"',
    ATTENTION: 'attn_implementation="eager" when the model is loaded',
    COMPILED: "no compile_config and no static cache",
    TEXTS: "no assistant_model, and report it",
}
_AUTO = (GRAPHS, KERNELS)  # what "auto" leaves out by itself where the verdict was written


class DeviceReport(NamedTuple):
    """What was seen on a device."""

    device: DeviceDescription
    seen: Sequence[Seen]
    verdict_path: str  # empty if none was written
    write_error: str  # why not; empty if nothing went wrong

    @property
    def failed(self) -> list[Seen]:
        return [outcome for outcome in self.seen if outcome.result in (WRONG, CRASHED)]

    @property
    def advice(self) -> str:
        """What to set, in one line; empty if nothing is wrong."""
        groups = list(dict.fromkeys(outcome.name.partition(":")[0] for outcome in self.failed))
        if not groups:
            folder = f"set XDG_CACHE_HOME to a folder that can be written, and run this again: {self.write_error}"
            return folder if self.write_error else ""
        follows = self.verdict_path and all(group in _AUTO for group in groups)
        auto = ' ("auto" does so from now on)' if follows else ""
        return f"set {', '.join(SETTINGS[group] for group in groups)}{auto}"


class DoctorReport(NamedTuple):
    """What was seen on a machine."""

    versions: dict[str, str]
    devices: Sequence[DeviceReport]
    error: str = ""  # why there is nothing to say

    @property
    def ok(self) -> bool:
        return not self.error and not any(device.advice for device in self.devices)

    @property
    def advice(self) -> str:
        """What to set on each device where something is wrong, in one line; empty if all is right."""
        if self.error:
            return f'set verifier_backend="torch" and speculation_graphs="off": {self.error}'
        return "; ".join(f"{device.device.name}: {device.advice}" for device in self.devices if device.advice)

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "advice": self.advice,
            "versions": self.versions,
            "devices": [
                {
                    "device": device.device.name,
                    "name": device.device.title,
                    **device.device.facts,
                    "checks": [{**seen._asdict(), "seconds": round(seen.seconds, 3)} for seen in device.seen],
                    "verdict": device.verdict_path or None,
                }
                for device in self.devices
            ],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield ", ".join(f"{name} {value}" for name, value in self.versions.items()) or "hf-speculate doctor"
        for device in self.devices:
            facts = "".join(f", {name} {value}" for name, value in device.device.facts.items())
            yield f"\n{device.device.name}: {device.device.title}{facts}"
            for seen in device.seen:
                detail = f" ({seen.detail})" if seen.detail else ""
                yield f"  {seen.result:8} {seen.name}, {seen.seconds:.1f} s{detail}"
            if device.verdict_path:
                yield f'  "auto" follows {device.verdict_path}'
        counts = [seen.result for device in self.devices for seen in device.seen]
        counted = ", ".join(f"{counts.count(result)} {result}" for result in (RIGHT, WRONG, CRASHED, NOT_RUN))
        yield f"\n{counted}"
        if not self.ok:
            yield self.advice
