"""One mutant: a replacement in one file of the library, and the tests that are likely to find it."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """A small fault."""

    name: str
    path: str  # of the file, relative to the repository
    old: str  # occurs exactly once in the file
    new: str
    tests: str  # files or folders in tests/ that are run first, separated by blanks
    equivalent: str = ""  # why no test can find it; empty if one must
