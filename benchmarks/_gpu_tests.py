"""Tests that run on the device, in processes beside a part or as a part of their own."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from _gpu_device import Device
from _gpu_report import NO_TIME, Report
from _harness import ROOT

KERNELS = ("-m", "not slow and not gpu", "tests/kernels")
MAX_WORKERS = 8
COUNT_S = 3.0  # left for counting what has been run
BENCHMARKS = ROOT / "benchmarks"
_STARTS_S = 5.0  # less is not worth beginning
_OUTCOME = re.compile(r"^\[gw\d+\] \[ *(\d+)%\] (\w+) ", re.M)
_SHOWN_CHARS = 4000


def marked_gpu() -> tuple[str, ...]:
    """Arguments that select the tests marked gpu, from their files alone: others import more than may be installed."""
    files = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8"))
    return ("-m", "gpu", *(str(path.relative_to(ROOT)) for path in files))


class TestRun:
    """A run of pytest that has begun.

    Args:
        arguments: of pytest.
        is_dry: whether no GPU is there: only what is skipped for that reason is run then.
    """

    def __init__(self, arguments: Sequence[str], is_dry: bool):
        self.is_interrupted = False
        workers = min(MAX_WORKERS, os.cpu_count() or 1)
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-n", str(workers)]
        command += ["-p", "_instant_failures", "--continue-on-collection-errors"]
        command += ["--dist", "worksteal", *arguments]
        if is_dry:  # hypothesis is hidden then, and its plugin cannot do without
            command += ["-m", "gpu", "-p", "no:hypothesispytest"]
        self._output = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115, closed with the run
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])},
        )

    def output_after(self, seconds: float) -> str:
        """What it printed, stopped if it takes longer."""
        try:
            self._process.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            self.is_interrupted = True
            self.stop()
        self._output.seek(0)
        return self._output.read()

    def stop(self) -> None:
        """Kill it if it still runs; its workers end with it."""
        self._process.kill()
        self._process.wait()


@contextmanager
def beside(arguments: Sequence[str], is_dry: bool) -> Iterator[TestRun]:
    """Tests that run while something else does."""
    run = TestRun(arguments, is_dry)
    try:
        yield run
    finally:
        run.stop()


def await_tests(report: Report, device: Device, name: str, run: TestRun) -> None:
    """A cell that takes all the time that is left, at most."""
    report.attempt(name, lambda: _await(report, device, name, run), limit_s=report.remaining_s, needs_s=_STARTS_S)


def _await(report: Report, device: Device, name: str, run: TestRun) -> None:
    begin = time.monotonic()
    output = run.output_after(report.remaining_s - COUNT_S)
    outcomes, percent = outcomes_in(output)
    print(output, flush=True)
    num_failed = outcomes["FAILED"] + outcomes["ERROR"]
    if not outcomes and run.is_interrupted:
        report.leave_out(name, NO_TIME)
        return
    is_any = outcomes["SKIPPED"] > 0 if device.is_dry else outcomes["PASSED"] > 0
    report.cell(
        what="tests",
        name=name,
        passed=outcomes["PASSED"],
        failed=num_failed,
        skipped=outcomes["SKIPPED"],
        percent=percent,
        waited_s=time.monotonic() - begin,
        ends_with=output[-_SHOWN_CHARS:] if num_failed or not is_any else output[-200:],
    )
    report.check(f"{name}: none fails", is_any and not num_failed, dict(outcomes))


def outcomes_in(output: str) -> tuple[Counter[str], int]:
    """Number of tests by outcome, and the share that was run, in percent."""
    outcomes = _OUTCOME.findall(output)
    return Counter(outcome for _, outcome in outcomes), max((int(percent) for percent, _ in outcomes), default=0)
