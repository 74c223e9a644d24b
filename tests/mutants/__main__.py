"""Apply mutants one by one to a copy of the repository, and run the tests that must fail.

    python -m tests.mutants [--only WORDS] [--all-tests] [--out FILE]

A mutant is killed if a test fails or does not end. Each mutant names the test files that are likely
to find it. With `--all-tests`, the rest of `make test` runs if those tests pass. A mutant is stale
if its text does not occur exactly once in its file, or if its tests are missing. The exit status is
1 if a mutant survives or is stale.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.mutants import forks
from tests.mutants.base import Mutant
from tests.mutants.caches import MUTANTS as CACHES
from tests.mutants.drafting import MUTANTS as DRAFTING
from tests.mutants.engine import MUTANTS as ENGINE
from tests.mutants.kernels import MUTANTS as KERNELS

ROOT = Path(__file__).parents[2]
MUTANTS = KERNELS + ENGINE + CACHES + DRAFTING
TIMEOUT_S, TIMEOUT_OF_ALL_S = 180, 1200  # long, because a mutant may cause an endless loop


class Outcome(NamedTuple):
    """Result of running one mutant."""

    name: str
    outcome: str
    # first failed test; or the reason why the mutant is stale; or None if it survived
    test: str | None
    seconds: float


def copy_repository(folder: Path) -> None:
    """Copy the files that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    for name in listed.stdout.splitlines():
        source, copy = ROOT / name, folder / name
        if source.is_symlink() or source.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)


def arguments_of_make_test() -> list[str]:
    """Return the arguments that `make test` passes to pytest."""
    named = re.findall(
        r"^(?:KERNEL|TOOL)_TESTS := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M
    )
    return ["tests", *(f"--ignore-glob={path}" for path in " ".join(named).split())]


def stale_reason(mutant: Mutant, folder: Path) -> str:
    """Return the reason why a mutant cannot be applied to the copy, or an empty string."""
    needed = [mutant.path, *(f"tests/{name}" for name in mutant.tests.split())]
    if missing := [name for name in needed if not (folder / name).exists()]:
        return f"there is no {' and no '.join(missing)}"
    num_places = (folder / mutant.path).read_text().count(mutant.old)
    return "" if num_places == 1 else f"{mutant.path} holds its text {num_places} times"


def run_mutant(mutant: Mutant, folder: Path, runs_all: bool) -> Outcome:
    """Apply the mutant to the copy, run its tests, and restore the file."""
    if reason := stale_reason(mutant, folder):
        return Outcome(mutant.name, "STALE", reason, 0.0)
    start, path = time.monotonic(), folder / mutant.path
    source, status = path.read_text(), path.stat()
    path.write_text(source.replace(mutant.old, mutant.new))
    # Otherwise, Python would use the old bytecode if the file size is the same.
    os.utime(path, (status.st_atime, status.st_mtime + 10))
    try:
        test = forks.failing_test(
            folder, [f"tests/{name}" for name in mutant.tests.split()], TIMEOUT_S
        )
        if test is None and runs_all:
            test = forks.failing_test(folder, arguments_of_make_test(), TIMEOUT_OF_ALL_S)
    finally:
        path.write_text(source)
        os.utime(path, (status.st_atime, status.st_mtime))
    return Outcome(
        mutant.name, "killed" if test else "SURVIVED", test, round(time.monotonic() - start, 1)
    )


def run_share(mutants: tuple[Mutant, ...], runs_all: bool) -> Iterator[Outcome]:
    """Run some of the mutants in one copy, in a separate process."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name).resolve()
        copy_repository(folder)
        forks.preload(folder)
        for mutant in mutants:
            yield run_mutant(mutant, folder, runs_all)


def main() -> int:
    """Run the mutants and print one line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="run mutants whose name contains this")
    parser.add_argument(
        "--all-tests",
        action="store_true",
        help="run all of make test for those that survive their files",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "build" / "mutants.json",
        help="results, written after each",
    )
    arguments = parser.parse_args()
    chosen = tuple(mutant for mutant in MUTANTS if arguments.only in mutant.name)
    outcomes: list[Outcome] = []
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for outcome in run_share(chosen, arguments.all_tests):
        outcomes.append(outcome)
        count = f"{len(outcomes)}/{len(chosen)}"
        print(
            f"{count} {outcome.outcome} in {outcome.seconds:.1f} s: {outcome.name}  "
            f"{outcome.test or ''}",
            flush=True,
        )
        arguments.out.write_text(
            json.dumps([outcome._asdict() for outcome in outcomes], indent=1) + "\n"
        )
    counts = Counter(outcome.outcome for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    print(f"{', '.join(f'{num} {outcome}' for outcome, num in counts.items())} in {seconds:.0f} s")
    return int(not counts.keys() <= {"killed"})


if __name__ == "__main__":
    sys.exit(main())
