"""Examines every device, and keeps the verdicts."""

from collections.abc import Callable, Mapping, Sequence

from hf_speculate.options.verdicts.verdict import RIGHT
from hf_speculate.tools.doctor.catalogue import COMPILED
from hf_speculate.tools.doctor.isolation import Ended, Limits, describe_machine, run_checks
from hf_speculate.tools.doctor.machine import DeviceDescription
from hf_speculate.tools.doctor.report import DeviceReport, DoctorReport
from hf_speculate.tools.doctor.site import NOT_RUN
from hf_speculate.tools.doctor.verdict_file import write_verdict
from hf_speculate.tools.doctor.worker import Seen

Say = Callable[[str], None]
LIMITS = Limits()


def examine(
    *, compiles: bool = False, simulation: str = "", limits: Limits = LIMITS, say: Say = lambda line: None
) -> DoctorReport:
    """Run the checks of all devices, and write what was seen on each CUDA device to its verdict file.

    Args:
        compiles: whether a compiled call is checked too.
        simulation: "module:function" that makes a context with a simulated device, in each process; empty for none.
        limits: seconds.
        say: is told what goes on.
    """
    try:
        machine = describe_machine(simulation, compiles, limits)
    except Ended as error:
        return DoctorReport({}, [], f"the devices could not be asked: {error}")
    return DoctorReport(machine.versions, [_examine(device, simulation, limits, say) for device in machine.devices])


def _examine(device: DeviceDescription, simulation: str, limits: Limits, say: Say) -> DeviceReport:
    seen: list[Seen] = []
    is_compiled = {name: name.startswith(f"{COMPILED}:") for name in device.checks}
    for names, limit_s, check_s in (
        ([name for name in device.checks if not is_compiled[name]], limits.device_s, limits.check_s),
        ([name for name in device.checks if is_compiled[name]], limits.compiled_s, limits.compiled_s),
    ):
        for outcome in run_checks(device, names, simulation, limits, limit_s, check_s):
            say(f"{device.name}  {outcome.name}: {outcome.result}")
            seen.append(outcome)
    return DeviceReport(device, seen, *_write(device, seen))


def _write(device: DeviceDescription, seen: Sequence[Seen]) -> tuple[str, str]:
    """The path of the verdict of a CUDA device, which calls read, and why it could not be written."""
    if not device.name.startswith("cuda"):
        return "", ""
    try:
        return str(write_verdict(device.key, results_of(seen))), ""
    except OSError as error:
        return "", str(error)


def results_of(seen: Sequence[Seen]) -> Mapping[str, str]:
    """What the verdict file says: a kind of which not all checks were run has no right ones."""
    unknown = {outcome.name.partition(":")[0] for outcome in seen if outcome.result == NOT_RUN}
    return {
        outcome.name: outcome.result
        for outcome in seen
        if outcome.result != NOT_RUN and not (outcome.result == RIGHT and outcome.name.partition(":")[0] in unknown)
    }
