"""Define one mutant: a replacement in one file of the library, and the tests likely to find it."""

from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    """Small fault in one file."""

    name: str
    path: str  # of the file, relative to the repository
    old: str  # occurs exactly once in the file
    new: str
    tests: str  # files or folders in tests/ that run first, separated by blanks


class Fault(NamedTuple):
    """Replacement in a file, with tests if they differ from those of the file."""

    old: str
    new: str
    tests: str = ""


def mutants_of(faults: dict[tuple[str, str], dict[str, Fault]]) -> tuple[Mutant, ...]:
    """Make mutants from faults by their names; the file and its tests are the defaults."""
    return tuple(
        Mutant(f"{Path(path).stem}: {name}", path, fault.old, fault.new, fault.tests or tests)
        for (path, tests), named in faults.items()
        for name, fault in named.items()
    )
