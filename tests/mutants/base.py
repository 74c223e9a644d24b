"""Define a mutant: a replacement in one library file, and the tests that are likely to find it."""

from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    """Small fault in one file."""

    name: str
    path: str  # path of the file, relative to the repository
    old: str  # occurs exactly once in the file
    new: str
    tests: str  # files or folders in tests/ that run first, separated by spaces


class Fault(NamedTuple):
    """Replacement in a file, and its tests if they differ from the default for the file."""

    old: str
    new: str
    tests: str = ""


def mutants_of(faults: dict[tuple[str, str], dict[str, Fault]]) -> tuple[Mutant, ...]:
    """Make mutants from named faults, with the file and its tests as defaults."""
    return tuple(
        Mutant(f"{Path(path).stem}: {name}", path, fault.old, fault.new, fault.tests or tests)
        for (path, tests), named in faults.items()
        for name, fault in named.items()
    )
