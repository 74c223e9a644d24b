"""Append-only files of results, which survive a kill of the process."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_speculate.errors import ConfigError
from hf_speculate.tools.atomic_file import replace_file, sync_folder

_BEGIN = b'{"id'  # of every line
_REPAIR = "repair or remove that line, or choose another output"


def append_json(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """Append one line per value and flush them to the disk."""
    _append(path, "".join(f"{json.dumps(value, ensure_ascii=False)}\n" for value in values).encode())


def _append(path: Path, lines: bytes) -> None:
    is_new = not path.exists()
    with path.open("ab") as file:
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync_folder(path.parent)


def cut_torn_line(path: Path) -> int:
    """Remove an incomplete last line; returns its number of bytes."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        end = sum(len(line) for line in file if line.endswith(b"\n"))
        file.seek(end)
        torn = file.read()
        if not _BEGIN.startswith(torn[: len(_BEGIN)]):
            raise ConfigError(f"each line must be a result, got another one at the end of {path}; {_REPAIR}")
        if torn:
            file.truncate(end)
            os.fsync(file.fileno())
    return len(torn)


def read_results(path: Path) -> Iterator[tuple[str, bytes]]:
    """Id and line of each result, in the order of the file; nothing if the file does not exist."""
    seen: set[str] = set()
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            source = f"{path.name}:{number}"
            try:
                key = str(json.loads(line)["id"])
            except (ValueError, KeyError, TypeError):
                raise ConfigError(f"each line must be a result, got another one at {source}; {_REPAIR}") from None
            if key in seen:
                raise ConfigError(f"ids must be unique, got {key!r} again at {source}; remove that line")
            seen.add(key)
            yield key, line


def ids_in(path: Path) -> set[str]:
    return {key for key, _ in read_results(path)}


def move_results(part: Path, whole: Path) -> None:
    """Move the results of one file to the end of another; may be killed at any time and repeated."""
    cut_torn_line(part)
    known = ids_in(whole)
    _append(whole, b"".join(line for key, line in read_results(part) if key not in known))
    part.unlink()


def put_in_order(path: Path, keys: Iterable[str]) -> None:
    """Sort the lines of a file by their ids; the file is whole at any time."""
    lines = dict(read_results(path))
    order = [key for key in keys if key in lines]
    if order != list(lines):
        replace_file(path, [lines[key] for key in order])
