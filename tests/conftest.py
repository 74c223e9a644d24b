"""Configure all tests: no network, a fixed seed, and markers that explain skipped tests."""

import importlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import Any

# Set before transformers is first imported, because it reads the variable only once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Processes started by tests use one thread, because other tests run on the other core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# Without a GPU, kernels run in Triton's interpreter. Triton reads its variable only once, too.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

# Tiny models do not benefit from threads, and threads wait for one another on a busy machine.
torch.set_num_threads(1)

if importlib.util.find_spec("hypothesis") is not None:  # tests that need it are skipped without it
    import hypothesis

    hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("repeatable")

# Requirement of each marker, and whether this machine meets it.
NEEDS = {
    "browser": ("needs Chromium", shutil.which("chromium") is not None),
    "gpu": ("needs a CUDA GPU", torch.cuda.is_available()),
    "hub_kernels": ("needs the kernels library", importlib.util.find_spec("kernels") is not None),
    "bitsandbytes": ("needs bitsandbytes", importlib.util.find_spec("bitsandbytes") is not None),
    "torchao": ("needs torchao", importlib.util.find_spec("torchao") is not None),
    "compiler": ("needs a C++ compiler", shutil.which(os.environ.get("CXX", "g++")) is not None),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "fail the run if a test was skipped although this machine can serve its marker"
    parser.addoption("--fail-on-skip", action="store_true", help=words)
    words = "folder of an environment of `pip install .`, for tests/plain_environment.py"
    parser.addoption("--environment", help=words)


def pytest_configure(config: pytest.Config) -> None:
    # all workers report to one process
    if config.getoption("--fail-on-skip") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Unserved())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, (reason, is_here) in NEEDS.items():
            if item.get_closest_marker(marker) and not is_here:
                item.add_marker(pytest.mark.skip(reason=reason))


class Unserved:
    """Plugin that fails a run with unexpected skips.

    A test may be skipped only if the machine lacks something that the test requires.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if reason.removeprefix("Skipped: ") not in {
            why for why, is_here in NEEDS.values() if not is_here
        }:
            self.lines.append(f"{report.nodeid}: {reason}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.lines and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.lines:
            terminalreporter.section("skipped, though this machine could have run them", red=True)
            for line in self.lines:
                terminalreporter.line(line)


@pytest.fixture(autouse=True, scope="session")
def _installed_transformers_is_tested() -> None:
    """Treat a newer transformers version as tested, so it triggers no warning and no self-test."""
    compat = importlib.import_module("hf_speculate.compat")
    if compat.is_newer_than_tested():
        compat._NEWEST = compat.transformers.__version__


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _named_fallbacks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Raise on every fallback that no marker of the test allows; texts do not reveal them."""
    words = [word for marker in request.node.iter_markers("fallback") for word in marker.args]
    with importlib.import_module("tests.support.fallbacks").only_fallbacks(*words):
        yield


@pytest.fixture
def registry() -> Iterator[None]:
    """Unregister the verifiers that a test has registered."""
    registered = importlib.import_module("hf_speculate.verify.base")._REGISTRY
    before = dict(registered)
    yield
    registered.clear()
    registered.update(before)


@pytest.fixture
def scripted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Make later calls use a schedule of changing draft lengths and plain steps; return their list.

    `parametrize("scripted", [lengths], indirect=True)` sets other lengths.
    """
    instances: list[object] = []
    module = importlib.import_module("tests.schedule.scripted")

    def make_schedule(plan: object, drafter: Any) -> object:
        lens = [0] if drafter.max_draft_tokens == 0 else getattr(request, "param", module.LENS)
        instances.append(module.ScriptedSchedule(lens, drafter.is_free))
        return instances[-1]

    monkeypatch.setattr("hf_speculate.engine.draft_length.make_schedule", make_schedule)
    return instances
