"""First light: the parts of a GPU check that fits six minutes, each in a process of its own, and their time limits.

Parts come in the order of what their answers decide. Time that a part leaves goes to the next one. A part that crashes
goes on behind the cell that it crashed in, one that reaches its limit ends there. What was written stays in any case.
"""

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from _findings import summary
from _gpu_report import num_attempted, read_part

LOG, SUMMARY = "first_light.log", "summary.txt"
SCRIPT = Path(__file__).with_name("on_gpu.py")
GRACE_S = 5.0  # a part ends by itself when its time is up; it is stopped this much later
MIN_RESTART_S = 25.0  # importing torch and transformers and making models take most of it
_PAUSE_S = 0.2
STOP_S = 2.0  # between asking a process to stop and killing it


class Part(NamedTuple):
    """A part and its share of the time."""

    name: str  # of its function in `_gpu_parts.FIRST_LIGHT` and of its file
    limit_s: float


# Together 345 s. The first one compiles about thirty kernels; the second one makes 9 billion random weights, decodes
# for about a minute, and compiles in the time that is left; the last one takes what nobody needed.
PARTS = (
    Part("kernels_and_texts", 85.0),
    Part("end_to_end", 160.0),
    Part("rounds", 35.0),
    Part("kernel_times", 35.0),
    Part("kernel_tests", 30.0),
)


class Process(Protocol):
    """A running part."""

    def is_running(self) -> bool: ...

    def stop(self) -> None:
        """End it with all that it started; also called when it has ended by itself."""


class Child:
    """A process in a group of its own, whose output goes to the log."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path):
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
            )

    def is_running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Ask the group to end, then kill what is left of it."""
        for number, wait_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)


Start = Callable[[Part, float, bool], Process]
"""Starts a part, given the seconds that it may take and whether it goes on where an earlier process ended."""


class Log:
    """The output of all processes in one file, which is shown while it grows."""

    def __init__(self, path: Path, began_s: float):
        self.path = path
        self._began_s = began_s
        self._num_shown = 0
        path.write_bytes(b"")

    def say(self, line: str) -> None:
        """Write a line of our own."""
        with self.path.open("ab") as file:
            file.write(f"[{time.time() - self._began_s:6.1f} s] {line}\n".encode())
        self.show()

    def show(self) -> None:
        """Print what has come since the last time."""
        with self.path.open("rb") as file:
            file.seek(self._num_shown)
            new = file.read()
        self._num_shown += len(new)
        with suppress(OSError):  # whoever read it may have gone
            sys.stdout.write(new.decode(errors="replace"))
            sys.stdout.flush()


def run_parts(
    parts: Sequence[Part],
    folder: Path,
    start: Start,
    say: Callable[[str], None],
    clock: Callable[[], float],
    pause: Callable[[], None],
) -> None:
    """Run all parts; each must end when its time and all that earlier parts left are used up."""
    end = clock()
    for part in parts:
        end += part.limit_s
        say(f"{part.name}: at most {end - clock():.0f} s")
        outcome = _run_part(part, end, folder, start, say, clock, pause)
        say(f"{part.name}: {outcome}")
        (folder / SUMMARY).write_text(_summary(folder) + "\n", encoding="utf-8")


def _run_part(
    part: Part,
    end: float,
    folder: Path,
    start: Start,
    say: Callable[[str], None],
    clock: Callable[[], float],
    pause: Callable[[], None],
) -> str:
    """Run a part until it is finished, its time is up, or it fails twice at the same place; how it ended."""
    is_resumed = False
    while True:
        num_before = num_attempted(read_part(folder, part.name)) if is_resumed else 0
        process = start(part, end - clock(), is_resumed)
        try:
            while process.is_running() and clock() < end + GRACE_S:
                pause()
            is_late = process.is_running()
        finally:
            process.stop()
        content = read_part(folder, part.name)
        if content.get("is_finished"):
            return "finished"
        if is_late or end - clock() < MIN_RESTART_S:
            return "stopped when its time was up" if is_late else "ended early"
        if num_attempted(content) <= num_before:
            return "ended early, and would again"
        is_resumed = True
        say(f"{part.name}: its process ended in {content['attempted'][-1]!r}; the other cells follow")


def chosen(only: Sequence[str], factor: float) -> list[Part]:
    """The parts of that name, or all, in their order; together they may take `factor` times what all take."""
    parts = [part for part in PARTS if not only or part.name in only]
    factor *= sum(part.limit_s for part in PARTS) / sum(part.limit_s for part in parts)
    return [part._replace(limit_s=factor * part.limit_s) for part in parts]


def first_light(folder: Path, parts: Sequence[Part], options: Sequence[str], environment: dict[str, str]) -> int:
    """Run parts.

    Args:
        folder: of the results.
        parts: see `chosen`.
        options: of every part's command.
        environment: variables of every part's process.

    Returns:
        0 if every part finished and every check was right, else 1.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:  # nothing of an earlier run may look like a result of this one
        (folder / f"{part.name}.json").unlink(missing_ok=True)
    began_s = time.time()
    log = Log(folder / LOG, began_s)

    def start(part: Part, limit_s: float, is_resumed: bool) -> Child:
        command = [sys.executable, "-u", str(SCRIPT), "--first-light-part", part.name, "--out", str(folder)]
        command += ["--limit-s", f"{limit_s:.1f}", "--began-at", f"{began_s:.1f}", *options]
        return Child(command + ["--resume"] * is_resumed, environment, log.path)

    def pause() -> None:
        time.sleep(_PAUSE_S)
        log.show()

    with _ended_by_signal():
        try:
            run_parts(parts, folder, start, log.say, time.monotonic, pause)
        finally:
            for path in folder.glob("*.tmp"):  # of a process that was killed while it wrote
                path.unlink()
            text = _summary(folder)
            (folder / SUMMARY).write_text(text + "\n", encoding="utf-8")
            log.say("summary\n" + text)
    contents = [read_part(folder, part.name) for part in parts]
    is_right = all(
        content.get("is_finished") and all(check["is_right"] for check in content["checks"]) for content in contents
    )
    return 0 if is_right else 1


def _summary(folder: Path) -> str:
    """The table, of whatever was written."""
    contents = {part.name: read_part(folder, part.name) for part in PARTS}
    try:
        return summary(contents)
    except Exception:  # noqa: BLE001, the parts that follow matter more
        return f"the results could not be summarised: {traceback.format_exc()}"


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """Let SIGTERM end this process as an error does, so that the running part is stopped and the summary printed."""

    def end(*args: object) -> None:
        raise SystemExit("stopped by a signal")

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
