"""Choose standard-library sources for training the pair."""

import json
import platform
import sysconfig
from pathlib import Path
from typing import NamedTuple

HELD_OUT_MODULES = (
    "bisect.py",
    "calendar.py",
    "cmd.py",
    "colorsys.py",
    "csv.py",
    "filecmp.py",
    "fnmatch.py",
    "fractions.py",
    "getopt.py",
    "graphlib.py",
    "heapq.py",
    "json/encoder.py",
    "queue.py",
    "reprlib.py",
    "sched.py",
    "shlex.py",
    "string.py",
    "textwrap.py",
    "urllib/robotparser.py",
    "wsgiref/headers.py",
)
"""Held-out paths below the standard library, used for prompts and losses only."""

EXCLUDED_PARTS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "idle_test",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    }
)
EXCLUDED_NAMES = frozenset({"__phello__.foo.py", "sre_constants.py", "this.py"})
EXCLUDED_PREFIXES = ("_sysconfigdata", "_osx_support")
MAX_FILE_BYTES = 300_000


class Sources(NamedTuple):
    """Files to read, relative to the standard library.

    Paths are POSIX paths.
    """

    training: list[str]  # sorted
    held_out: list[str]  # sorted; files from HELD_OUT_MODULES that this interpreter has


def stdlib_root() -> Path:
    """Return the standard-library folder of the running interpreter."""
    return Path(sysconfig.get_path("stdlib"))


def list_sources(root: Path) -> Sources:
    """List the training and held-out files under `root`.

    Args:
        root: a standard-library folder.

    Returns:
        The two disjoint lists.
    """
    held_out = [name for name in HELD_OUT_MODULES if (root / name).is_file()]
    training = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if EXCLUDED_PARTS.intersection(relative.parts) or relative.name in EXCLUDED_NAMES:
            continue
        if relative.name.startswith(EXCLUDED_PREFIXES) or relative.as_posix() in HELD_OUT_MODULES:
            continue
        if 0 < path.stat().st_size <= MAX_FILE_BYTES:
            training.append(relative.as_posix())
    return Sources(sorted(training), sorted(held_out))


def read_source(root: Path, name: str) -> str:
    """Read a file, expand tabs, and replace bytes that are not UTF-8."""
    return (root / name).read_text(encoding="utf-8", errors="replace").expandtabs(8)


def write_sources(path: Path, sources: Sources) -> None:
    """Write the two lists and the version of the interpreter as JSON."""
    record = {"python": platform.python_version(), **sources._asdict()}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
