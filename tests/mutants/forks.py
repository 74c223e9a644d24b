"""Run tests in forks of a process that has imported torch, transformers and pytest.

The process has not imported the library.
"""

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

# Read only once, at import.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
COPIED = ("tests", "hf_speculate")  # packages that each fork imports from its copy
POLL_S = 0.02


class _Watch:
    """Pytest plugin that records the first failed test and whether collection failed."""

    failed: str | None = None
    collection_failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


def _run_pytest(folder: Path, arguments: Sequence[str]) -> tuple[int, str | None]:
    """Run the tests in a copy of the repository, inside a fork."""
    for name in [name for name in sys.modules if name.partition(".")[0] in COPIED]:
        del sys.modules[name]
    root = str(Path(__file__).parents[2])
    sys.path[:] = [str(folder), *(path for path in sys.path if path not in ("", root))]
    os.chdir(folder)
    watch = _Watch()
    options = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
        "not slow",
        "--tb=short",
    ]
    status = pytest.main([*options, *arguments], plugins=[watch])
    return int(status), watch.failed


def _imported(folder: Path) -> list[str]:
    """Return the names of imported modules that are outside the copy."""
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    return [
        name
        for name, file in files.items()
        if file and not file.startswith(str(folder)) and name != "__main__"
    ]


def _in_fork(work: Callable[[], object], log: Path, timeout_s: float) -> object:
    """Return the result of `work`, run in a fork whose output goes to `log`.

    Return None if the fork took too long or died.
    """
    with tempfile.NamedTemporaryFile() as result:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            with log.open("w") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            Path(result.name).write_text(json.dumps(work()))
            os._exit(0)
        end = time.monotonic() + timeout_s
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() > end:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return None
            time.sleep(POLL_S)
        text = Path(result.name).read_text()
    return json.loads(text) if text else None


def preload(folder: Path) -> None:
    """Import the other libraries that tests use, and compile the copy's modules to bytecode."""
    os.environ |= ENVIRONMENT

    def collect() -> list[str]:
        status, _ = _run_pytest(folder, ["--collect-only", "tests"])
        return _imported(folder) if status == 0 else []

    names = _in_fork(collect, folder / "collect.log", timeout_s=600)
    if not isinstance(names, list) or not names:
        raise RuntimeError(
            "the tests must be collected without "
            f"errors:\n{(folder / 'collect.log').read_text()[-2000:]}"
        )
    # Forks read the bytecode. The bytecode of a mutant is never stored.
    sys.dont_write_bytecode = True
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:  # such a module is created by another one and cannot be found by name
            continue
    sys.modules["torch"].set_num_threads(1)


def failing_test(folder: Path, tests: Sequence[str], timeout_s: float) -> str | None:
    """Return the first failed test, "timeout" or "crash", or None if all tests pass."""
    start, log = time.monotonic(), folder / "run.log"
    outcome = _in_fork(lambda: _run_pytest(folder, tests), log, timeout_s)
    if not isinstance(outcome, list):
        return "timeout" if time.monotonic() - start >= timeout_s else "crash"
    status, failed = outcome
    if status not in (
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
        pytest.ExitCode.INTERRUPTED,
    ):
        raise RuntimeError(
            f"pytest must run the tests {' '.join(tests)}, got status "
            f"{status}:\n{log.read_text()[-2000:]}"
        )
    return failed
