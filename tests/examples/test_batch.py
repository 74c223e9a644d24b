"""The batch example runs as it stands."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "batch.py"


@pytest.mark.slow
def test_the_example_is_interrupted_and_goes_on():
    result = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "interrupted" in lines
    assert any(line in lines for line in ("2 were there already", "3 were there already"))
    names = [line.split(" (")[0] for line in lines if line.endswith(" tokens)")]
    assert names == ["1", "stack", "3", "4", "5"]
