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
        return [one for one in self.seen if one.result in (WRONG, CRASHED)]

    @property
    def advice(self) -> str:
        """What to set, in one line; empty if nothing is wrong."""
        kinds = list(dict.fromkeys(one.name.partition(":")[0] for one in self.failed))
        if not kinds:
            folder = f"set XDG_CACHE_HOME to a folder that can be written, and run this again: {self.write_error}"
            return folder if self.write_error else ""
        follows = self.verdict_path and all(kind in _AUTO for kind in kinds)
        auto = ' ("auto" does so from now on)' if follows else ""
        return f"set {', '.join(SETTINGS[kind] for kind in kinds)}{auto}"


class DoctorReport(NamedTuple):
    """What was seen on a machine."""

    versions: dict[str, str]
    devices: Sequence[DeviceReport]
    error: str = ""  # why there is nothing to say

    @property
    def ok(self) -> bool:
        return not self.error and not any(one.advice for one in self.devices)

    @property
    def advice(self) -> str:
        """What to set on each device where something is wrong, in one line; empty if all is right."""
        if self.error:
            return f'set verifier_backend="torch" and speculation_graphs="off": {self.error}'
        return "; ".join(f"{one.device.name}: {one.advice}" for one in self.devices if one.advice)

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "advice": self.advice,
            "versions": self.versions,
            "devices": [
                {
                    "device": one.device.name,
                    "name": one.device.title,
                    **one.device.facts,
                    "checks": [{**seen._asdict(), "seconds": round(seen.seconds, 3)} for seen in one.seen],
                    "verdict": one.verdict_path or None,
                }
                for one in self.devices
            ],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield ", ".join(f"{name} {value}" for name, value in self.versions.items()) or "hf-speculate doctor"
        for one in self.devices:
            facts = "".join(f", {name} {value}" for name, value in one.device.facts.items())
            yield f"\n{one.device.name}: {one.device.title}{facts}"
            for seen in one.seen:
                detail = f" ({seen.detail})" if seen.detail else ""
                yield f"  {seen.result:8} {seen.name}, {seen.seconds:.1f} s{detail}"
            if one.verdict_path:
                yield f'  "auto" follows {one.verdict_path}'
        counts = [seen.result for one in self.devices for seen in one.seen]
        counted = ", ".join(f"{counts.count(result)} {result}" for result in (RIGHT, WRONG, CRASHED, NOT_RUN))
        yield f"\n{counted}"
        if not self.ok:
            yield self.advice
