"""Print each pytest failure immediately, because an interrupted run prints no summary."""

import pytest

_SHOWN_CHARS = 2000


class InstantFailures:
    """Plugin that prints the end of each traceback."""

    def __init__(self, config: pytest.Config):
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\n{report.nodeid}\n{report.longreprtext[-_SHOWN_CHARS:]}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers report to the main process
        config.pluginmanager.register(InstantFailures(config))
