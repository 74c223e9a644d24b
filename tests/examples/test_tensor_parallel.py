"""The tensor-parallel example, in two processes that torchrun starts."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "tensor_parallel.py"
NUM_PROCESSES = 2


@pytest.mark.slow
def test_processes_of_torchrun_get_one_text():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_PROCESSES}"]
    result = subprocess.run([*launcher, SCRIPT], capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 0, result.stderr
    assert f"processes: {NUM_PROCESSES}, all with one text: True" in result.stdout
    assert "rows as plain generate() has them: 3 of 3" in result.stdout
    (num,) = re.findall(r"^mean acceptance length: ([\d.]+) ", result.stdout, re.M)
    assert float(num) >= 1
