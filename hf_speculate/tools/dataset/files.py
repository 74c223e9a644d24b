"""Append-only files of results, which survive a kill of the process."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_speculate.errors import ConfigError
from hf_speculate.tools.atomic_file import replace_file, sync_folder

_BEGIN = b'{"id'  # of every line


class Span(NamedTuple):
    """Position of a line in its file, in bytes."""

    begin: int
    num_bytes: int


def append_results(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Append one line per result and flush them to the disk."""
    text = "".join(f"{json.dumps(result, ensure_ascii=False)}\n" for result in results)
    append_lines(path, text.encode())


def append_lines(path: Path, lines: bytes) -> None:
    """Append whole lines and flush them to the disk."""
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
        end = 0
        for line in file:
            end += len(line) * line.endswith(b"\n")
        num_bytes = file.tell()
        file.seek(end)
        if not _BEGIN.startswith(file.read(len(_BEGIN))):
            raise ConfigError(
                f"each line of the output must be a result, got another one at the end of {path}; repair or remove "
                "that line, or choose another output"
            )
        if end < num_bytes:
            file.truncate(end)
            os.fsync(file.fileno())
    return num_bytes - end


def spans_of(path: Path) -> dict[str, Span]:
    """Position of the result of each id, in the order of the file; empty if the file does not exist."""
    spans: dict[str, Span] = {}
    if not path.exists():
        return spans
    begin = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                key = str(json.loads(line)["id"])
            except (ValueError, KeyError, TypeError):
                raise ConfigError(
                    f"each line of the output must be a result, got another one at {path.name}:{number}; repair or "
                    "remove that line, or choose another output"
                ) from None
            if key in spans:
                raise ConfigError(f"ids must be unique, got {key!r} again at {path.name}:{number}; remove that line")
            spans[key] = Span(begin, len(line))
            begin += len(line)
    return spans


def move_results(part: Path, whole: Path) -> None:
    """Move the results of one file to the end of another; may be killed at any time and repeated."""
    cut_torn_line(part)
    known = spans_of(whole)
    spans = spans_of(part)
    if spans:
        with part.open("rb") as file:
            append_lines(whole, b"".join(_line(file, span) for key, span in spans.items() if key not in known))
    part.unlink()


def put_in_order(path: Path, keys: Iterable[str]) -> None:
    """Sort the lines of a file by their ids; the file is whole at any time."""
    spans = spans_of(path)
    order = [key for key in keys if key in spans]
    if order != list(spans):
        with path.open("rb") as file:
            replace_file(path, (_line(file, spans[key]) for key in order))


def _line(file: Any, span: Span) -> bytes:
    file.seek(span.begin)
    return bytes(file.read(span.num_bytes))
