"""Run a check in a separate process with a time limit, so device faults only end the check."""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_speculate.tools.doctor.checks import CHECKS, Sizes, WrongResultError

RIGHT, WRONG, NOT_RUN = "right", "wrong", "not run"
_END_S = 5.0  # seconds to wait for a killed process


class Seen(NamedTuple):
    """The result of a check."""

    name: str
    result: str  # RIGHT, WRONG or NOT_RUN
    detail: str
    seconds: float


def run_check(
    name: str,
    device: str,
    sizes: Sizes,
    limit_s: float,
    enter: Callable[[], AbstractContextManager[Any]],
) -> Seen:
    """Run the check `name` from `CHECKS` in a new process, within the context made by `enter`."""
    has_forkserver = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if has_forkserver else "spawn")
    if has_forkserver:
        context.set_forkserver_preload([__name__])  # imports torch, and touches no device
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "log"
        receive, send = context.Pipe(duplex=False)
        process = context.Process(
            target=_serve, args=(send, str(log), name, device, sizes, enter), daemon=True
        )
        process.start()
        send.close()
        try:
            result, detail = _received(receive, process, log, limit_s)
        finally:
            process.kill()
            process.join(_END_S)
            receive.close()
    return Seen(name, result, detail, time.monotonic() - begin)


def _received(receive: Connection, process: Any, log: Path, limit_s: float) -> tuple[str, str]:
    if not receive.poll(limit_s):
        return WRONG, f"no answer in {limit_s:.0f} s"
    try:
        answer: tuple[str, str] = receive.recv()
    except EOFError:
        process.join(_END_S)
        return WRONG, _how_it_ended(process.exitcode, log)
    return answer


def _how_it_ended(exit_code: int | None, log: Path) -> str:
    """Describe how a process ended, with the last line that it printed."""
    how = f"its process ended with status {exit_code}"
    if exit_code is not None and exit_code < 0:
        with suppress(ValueError):
            how = f"its process was ended by {signal.Signals(-exit_code).name}"
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return f"{how}: {lines[-1][:300]}" if lines else how


def _serve(
    send: Connection,
    log: str,
    name: str,
    device: str,
    sizes: Sizes,
    enter: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Run a check and send its result; print to the file `log`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            os.dup2(descriptor, stream.fileno())
    torch.manual_seed(0)
    # tiny models gain nothing from threads, which wait for each other on a busy machine
    torch.set_num_threads(1)
    with enter():
        send.send(_answer(name, torch.device(device), sizes))
    send.close()


def _answer(name: str, device: torch.device, sizes: Sizes) -> tuple[str, str]:
    try:
        detail = CHECKS[name](device, sizes)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except WrongResultError as error:
        return WRONG, str(error)
    except torch.OutOfMemoryError:
        return NOT_RUN, "the device's memory is short"
    except Exception as error:  # noqa: BLE001, reported
        return (
            WRONG,
            f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:300]}",
        )
    return RIGHT, detail
