"""Applies mutants one by one to a copy of the repository, and runs the tests that must fail.

    python -m tests.mutants [--only WORDS] [--out FILE]

A mutant is killed if a test that `make test` runs fails or does not end. The files that the mutant names run first; the
whole of `make test` runs only if they pass. Exit status 1 if a mutant survives that is not listed as equivalent.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.base import Mutant
from tests.mutants.caches import MUTANTS as CACHES
from tests.mutants.drafting import MUTANTS as DRAFTING
from tests.mutants.engine import MUTANTS as ENGINE
from tests.mutants.kernels import MUTANTS as KERNELS

ROOT = Path(__file__).parents[2]
MUTANTS = KERNELS + ENGINE + CACHES + DRAFTING
TIMEOUT_S = 900  # of one run of tests; a mutant may make a loop endless


def copy_repository(folder: Path) -> None:
    """Copy the files that git knows or would add."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        source, copy = ROOT / name, folder / name
        if source.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)


def failing_test(folder: Path, tests: Sequence[str], workers: int) -> str | None:
    """The first test that fails, "timeout", or None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--tb=no"]
    if workers > 1:
        command += ["-n", str(workers), "--dist", "worksteal"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(
            [*command, *tests], cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return "timeout"
    if run.returncode == 0:
        return None
    failed = [line.split()[1] for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if not failed:
        raise RuntimeError(f"pytest must name a failing test, got status {run.returncode}:\n{run.stdout[-2000:]}")
    return failed[0]


def run_mutant(mutant: Mutant, folder: Path, workers: int) -> str | None:
    """The test that kills the mutant; None if it survives `make test`."""
    path = folder / mutant.path
    source = path.read_text()
    path.write_text(source.replace(mutant.old, mutant.new))
    try:
        named = [f"tests/{name}" for name in mutant.tests.split()]
        return failing_test(folder, named, workers) or failing_test(folder, ["tests"], workers)
    finally:
        path.write_text(source)


def main() -> int:
    """Run the mutants, and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run mutants whose name contains this")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that run tests")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants.json", help="results, written after each")
    arguments = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if arguments.only in mutant.name]
    results, counts = [], Counter[str]()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        copy_repository(folder)
        for number, mutant in enumerate(chosen, 1):
            start = time.monotonic()
            test = run_mutant(mutant, folder, arguments.workers)
            outcome = "killed" if test else "equivalent" if mutant.equivalent else "SURVIVED"
            if test and mutant.equivalent:
                outcome = "KILLED, BUT LISTED AS EQUIVALENT"
            seconds = time.monotonic() - start
            counts[outcome] += 1
            print(f"{number}/{len(chosen)} {outcome} in {seconds:.0f} s: {mutant.name}  {test or ''}", flush=True)
            results.append({"name": mutant.name, "outcome": outcome, "test": test, "seconds": round(seconds, 1)})
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(", ".join(f"{num} {outcome}" for outcome, num in counts.items()))
    return int(any(outcome.isupper() or "," in outcome for outcome in counts))


if __name__ == "__main__":
    sys.exit(main())
