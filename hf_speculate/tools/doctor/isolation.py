"""Runs checks in processes of their own with time limits, so that a fault of a device ends a check and nothing else."""

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from hf_speculate.options.verdicts.verdict import CRASHED
from hf_speculate.tools.doctor import worker
from hf_speculate.tools.doctor.machine import DeviceDescription, Machine
from hf_speculate.tools.doctor.site import NOT_RUN
from hf_speculate.tools.doctor.worker import BEGUN, Seen

_END_S = 5.0  # in which a process that was killed must be gone


class Limits(NamedTuple):
    """Seconds."""

    start_s: float = 60.0  # until a process has imported what it needs and reached the device
    check_s: float = 20.0
    device_s: float = 60.0  # all checks of a device
    compiled_s: float = 180.0  # a compiled call, besides


class Ended(Exception):
    """A process ended, or was late; the text says how."""


def describe_machine(simulation: str, compiles: bool, limits: Limits) -> Machine:
    """What there is; raises `Ended` if a device could not even be asked."""
    with _process(simulation, worker.describe_machine, (compiles,)) as receive:
        machine: Machine = receive(limits.start_s)[1]
    return machine


def run_checks(
    device: DeviceDescription, names: Sequence[str], simulation: str, limits: Limits, limit_s: float, check_s: float
) -> Iterator[Seen]:
    """What each check saw; those that no time was left for are not run.

    A check that is late or whose process ends has crashed, and those after it go on in another process.
    """
    left, end_s = list(names), time.monotonic() + limit_s
    while left and time.monotonic() < end_s:
        try:
            with _process(simulation, worker.run_checks, (device.name, left)) as receive:
                receive(limits.start_s)
                while left:
                    seen = _next_seen(receive, left[0], end_s, check_s)
                    left.pop(0)
                    yield seen
                    if seen.result == CRASHED:
                        break
        except Ended as error:  # before its first check
            yield Seen(left.pop(0), CRASHED, f"no process reached the device: {error}")
    yield from (Seen(name, NOT_RUN, "no time was left") for name in left)


def _next_seen(receive: Callable[[float], Any], name: str, end_s: float, check_s: float) -> Seen:
    """The next check of a process."""
    begin = time.monotonic()
    limit_s = min(check_s, max(end_s - begin, 0.0))
    try:
        message = receive(limit_s)
        if message[0] == BEGUN:
            message = receive(max(limit_s - (time.monotonic() - begin), 0.0))
        seen: Seen = message[1]
    except Ended as error:
        seconds = time.monotonic() - begin
        if limit_s < check_s and seconds >= limit_s:
            return Seen(name, NOT_RUN, "no time was left", seconds)
        return Seen(name, CRASHED, str(error), seconds)
    return seen


@contextmanager
def _process(simulation: str, job: Callable[..., None], arguments: tuple[Any, ...]) -> Iterator[Callable[[float], Any]]:
    """A process that runs a job; gives what waits so many seconds for its next message, or raises `Ended`."""
    has_forkserver = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if has_forkserver else "spawn")
    if has_forkserver:
        context.set_forkserver_preload([worker.__name__])  # imports torch, and asks no device
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "log"
        messages, send = context.Pipe(duplex=False)
        process = context.Process(target=worker.serve, args=(send, str(log), simulation, job, arguments), daemon=True)
        process.start()
        send.close()

        def receive(limit_s: float) -> Any:
            return _receive(messages, process, log, limit_s)

        try:
            yield receive
        finally:
            _end(process)
            messages.close()


def _receive(messages: Connection, process: Any, log: Path, limit_s: float) -> Any:
    if not messages.poll(limit_s):
        raise Ended(f"no answer in {limit_s:.0f} s")
    try:
        return messages.recv()
    except EOFError:
        process.join(_END_S)
        raise Ended(_how(process.exitcode, log)) from None


def _how(exit_code: int | None, log: Path) -> str:
    """How a process ended, with the last line that it printed."""
    how = f"its process ended with status {exit_code}"
    if exit_code is not None and exit_code < 0:
        with suppress(ValueError):
            how = f"its process was ended by {signal.Signals(-exit_code).name}"
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return f"{how}: {lines[-1][:300]}" if lines else how


def _end(process: Any) -> None:
    """End a process and all that it started; one that the driver does not let go is left behind."""
    if process.is_alive():
        process.join(0.2)  # it may be done
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == process.pid:
                os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join(_END_S)
