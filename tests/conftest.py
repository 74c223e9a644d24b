"""What every test starts from: no network, a fixed seed, and markers that say why they skip."""

import importlib.util
import os
import shutil

# Before transformers is imported anywhere: it reads the variable once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

# Without a GPU kernels run in Triton's interpreter; it too reads its variable once.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis
import pytest

# Tiny models gain nothing from threads, and on a busy machine wait most of the time for one another.
torch.set_num_threads(1)

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")

# What a marker needs, and whether this machine has it.
NEEDS = {
    "gpu": ("needs a CUDA GPU", torch.cuda.is_available()),
    "torchao": ("needs torchao", importlib.util.find_spec("torchao") is not None),
    "compiler": ("needs a C++ compiler", shutil.which(os.environ.get("CXX", "g++")) is not None),
}
UNSERVED = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fail-on-skip",
        action="store_true",
        help="fail the run if a test was skipped for another reason than that this machine cannot serve its marker",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[UNSERVED] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, (reason, is_here) in NEEDS.items():
            if item.get_closest_marker(marker) and not is_here:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if reason.removeprefix("Skipped: ") not in {why for why, is_here in NEEDS.values() if not is_here}:
            item.config.stash[UNSERVED].append(f"{item.nodeid}: {reason}")
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--fail-on-skip") and session.config.stash[UNSERVED] and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--fail-on-skip") and config.stash[UNSERVED]:
        terminalreporter.section("skipped, though this machine could have run them", red=True)
        for line in config.stash[UNSERVED]:
            terminalreporter.line(line)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
