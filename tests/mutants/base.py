"""One mutant: a replacement in one file of the library, and the tests that are likely to find it."""

from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    """A small fault."""

    name: str
    path: str  # of the file, relative to the repository
    old: str  # occurs exactly once in the file
    new: str
    tests: str  # files or folders in tests/ that are run first, separated by blanks


class Fault(NamedTuple):
    """What is replaced in a file, what by, and the tests that find it, if they are not those of the file."""

    old: str
    new: str
    tests: str = ""


def mutants_of(faults: dict[tuple[str, str], dict[str, Fault]]) -> tuple[Mutant, ...]:
    """Mutants from faults by their names, by the file and the tests of those that name none."""
    return tuple(
        Mutant(f"{Path(path).stem}: {name}", path, fault.old, fault.new, fault.tests or tests)
        for (path, tests), named in faults.items()
        for name, fault in named.items()
    )
