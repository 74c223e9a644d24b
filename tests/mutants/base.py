"""One mutant: a replacement in one file of the library, and the tests that are likely to find it."""

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


def mutants_of(path: str, tests: str, faults: dict[str, Fault]) -> tuple[Mutant, ...]:
    """The mutants of one file, whose faults have names; `tests` are those of a fault that names none."""
    return tuple(Mutant(name, path, fault.old, fault.new, fault.tests or tests) for name, fault in faults.items())
