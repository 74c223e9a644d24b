"""Run the tests of the core with a copy of the library that has no options.

`python -m tests.core_alone` links the library without `options/` into a new folder and runs the
tests of the core packages there. Tests that need an option fail on the missing module; they are
skipped and counted. All other tests must pass.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support.missing_options import Missing, hide

ROOT = Path(__file__).resolve().parents[1]
LIBRARY, OPTIONS = "hf_speculate", "options"
PACKAGES = (
    "cache",
    "draft",
    "engine",
    "generation",
    "models",
    "processors",
    "reliability",
    "schedule",
    "verify",
)
MISSING = f"No module named '{LIBRARY}.{OPTIONS}"
REASON = "needs an option"
FINDER = pytest.StashKey[Missing]()
COPIED = ("tests", "pyproject.toml")  # pytest looks up conftest files in these folders


def skipped(report: Any, path: str) -> Any:
    """Report the test as skipped."""
    report.outcome, report.longrepr = "skipped", (path, 0, REASON)
    return report


def pytest_configure(config: pytest.Config) -> None:
    """Hide the options of an editable installation; test modules may still import from them."""
    config.stash[FINDER] = hide(None)
    config.stash[FINDER].gives_placeholders = True


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[FINDER].fail()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    is_missing = report.failed and MISSING in str(report.longrepr)
    return skipped(report, str(collector.path)) if is_missing else report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    is_missing = report.failed and MISSING in str(report.longrepr)
    return skipped(report, str(item.path)) if is_missing else report


def link(folder: Path) -> None:
    """Link the library without its options, and its tests, into `folder`."""
    (folder / LIBRARY).mkdir()
    for entry in (ROOT / LIBRARY).iterdir():
        if entry.name != OPTIONS:
            (folder / LIBRARY / entry.name).symlink_to(entry)
    for entry in ROOT.iterdir():
        if entry.name not in (LIBRARY, *COPIED) and not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in COPIED), str(folder)], check=True)


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        link(folder)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.core_alone",
            "-m",
            "not slow",
            *arguments,
        ]
        command += [f"tests/{package}" for package in PACKAGES]
        return subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": name}
        ).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
