"""Test the core without its options."""

import subprocess
import sys

from tests.test_floors import ROOT


def test_core_decodes_without_each_option_and_without_all(tmp_path):
    command = [sys.executable, "-m", "tests.core_calls", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    assert "0 failed" in done.stdout
