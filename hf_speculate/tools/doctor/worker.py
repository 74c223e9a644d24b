"""What runs in a process of its own: checks of one device, each answered as soon as it is done."""

import os
import pkgutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from hf_speculate.options.verdicts.verdict import CRASHED, RIGHT, WRONG
from hf_speculate.tools.doctor.catalogue import CHECKS
from hf_speculate.tools.doctor.machine import describe
from hf_speculate.tools.doctor.site import NOT_RUN, NotHere, Site, WrongResult

READY, BEGUN, DONE = "ready", "begun", "done"  # messages


class Seen(NamedTuple):
    """What a check saw."""

    name: str
    result: str  # "right", "wrong", "crashed" or "not run"
    detail: str = ""
    seconds: float = 0.0


def serve(send: Connection, log: str, simulation: str, job: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Run a job, which sends messages; what the process prints goes to the file `log`.

    Args:
        send: where messages go.
        log: path of a file.
        simulation: "module:function" that makes a context in which a simulated device is there; empty for real ones.
        job: `run_checks` or `describe_machine`.
        arguments: of the job, after `send` and whether the device is simulated.
    """
    if hasattr(os, "setsid"):
        os.setsid()  # so that all it starts can be ended with it
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            os.dup2(descriptor, stream.fileno())
    context: AbstractContextManager[Any] = pkgutil.resolve_name(simulation)() if simulation else nullcontext()
    with context:
        job(send, bool(simulation), *arguments)
    send.close()


def describe_machine(send: Connection, is_simulated: bool, compiles: bool) -> None:
    """Send the `Machine`."""
    send.send((DONE, describe(compiles)))


def run_checks(send: Connection, is_simulated: bool, device: str, names: Sequence[str]) -> None:
    """Send the beginning and the end of each check; after an error the device may be lost, and none follows."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # tiny models gain nothing from threads, and wait for one another on a busy machine
    site = Site(torch.device(device))
    if is_simulated:
        site = Site(torch.device(device), 97, 2, 32, 6, (3,), True)
    send.send((READY, None))
    for name in names:
        send.send((BEGUN, name))
        seen = _run(name, site)
        send.send((DONE, seen))
        if seen.result == CRASHED:
            return


def _run(name: str, site: Site) -> Seen:
    begin = time.perf_counter()
    try:
        detail, result = CHECKS[name](site), RIGHT
        _synchronize(site)
    except WrongResult as error:
        detail, result = str(error), WRONG
    except NotHere as error:
        detail, result = str(error), NOT_RUN
    except torch.OutOfMemoryError:
        detail, result = "the device's memory is short", NOT_RUN
    except Exception as error:  # noqa: BLE001, reported
        first = next(iter(str(error).strip().splitlines()), "")
        detail, result = f"{type(error).__name__}: {first[:300]}", CRASHED
    return Seen(name, result, detail, time.perf_counter() - begin)


def _synchronize(site: Site) -> None:
    """Wait, so that an error of the device belongs to the check that made it."""
    if site.device.type == "cuda":
        torch.cuda.synchronize(site.device)
