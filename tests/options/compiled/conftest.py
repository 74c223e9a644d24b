"""A stand-in for device graphs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_speculate.models.runner import GRAPH_BACKENDS
from hf_speculate.options.verdicts.verdict import device_key
from hf_speculate.tools.doctor.verdict_file import write_verdict
from tests.support.recorded_graphs import RecordedGraphs


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[RecordedGraphs]]:
    """The stand-in, as what captures graphs on a CPU, where `hf-speculate doctor` saw that they are right."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_verdict(device_key(torch.device("cpu")), {"graphs: one row": "right"})
    monkeypatch.setitem(GRAPH_BACKENDS, "cpu", "tests.support.recorded_graphs:RecordedGraphs")
    RecordedGraphs.num_captures = RecordedGraphs.num_replays = 0
    yield RecordedGraphs
