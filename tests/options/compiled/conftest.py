"""A stand-in for device graphs."""

from collections.abc import Iterator

import pytest

from hf_speculate.models.runner import GRAPH_BACKENDS
from hf_speculate.options.compiled.compilation import warn_once
from tests.support.recorded_graphs import RecordedGraphs


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[RecordedGraphs]]:
    """The stand-in, as what captures graphs on a CPU."""
    monkeypatch.setitem(GRAPH_BACKENDS, "cpu", "tests.support.recorded_graphs:RecordedGraphs")
    RecordedGraphs.num_captures = RecordedGraphs.num_replays = RecordedGraphs.num_code_replays = 0
    warn_once.cache_clear()
    yield RecordedGraphs
