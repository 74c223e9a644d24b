"""The files of a data set's run, which survive a killed process and let a run resume."""

import codecs
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from hf_speculate.errors import ConfigError
from hf_speculate.field_checks import Check, is_int, one_of
from hf_speculate.tools.atomic_file import replace_file, sync_folder
from hf_speculate.tools.dataset.rows import Row, digest_of

_BEGIN = b'{"id'  # start of every line
_REPAIR = "repair or remove that line, or choose another output"
_FORMAT = 1


def append_json(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """Append one line per value, and flush the lines to disk."""
    _append(
        path, "".join(f"{json.dumps(value, ensure_ascii=False)}\n" for value in values).encode()
    )


def _append(path: Path, lines: bytes) -> None:
    is_new = not path.exists()
    with path.open("ab") as file:
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync_folder(path.parent)


def cut_torn_line(path: Path) -> None:
    """Remove an incomplete last line."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = sum(len(line) for line in file if line.endswith(b"\n"))
        file.seek(end)
        torn = file.read().removeprefix(codecs.BOM_UTF8)
        if not _BEGIN.startswith(torn[: len(_BEGIN)]):
            raise ConfigError(
                f"each line must be a result, got another one at the end of {path}; {_REPAIR}"
            )
        if torn:
            file.truncate(end)
            os.fsync(file.fileno())


def read_results(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the id and line of each result; nothing if the file is missing."""
    seen: set[str] = set()
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, marked_line in enumerate(file, 1):
            source, line = f"{path.name}:{number}", marked_line.removeprefix(codecs.BOM_UTF8)
            try:
                key = str(json.loads(line)["id"])
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ConfigError(
                    f"each line must be a result, got another one at {source}; {_REPAIR}"
                ) from None
            if key in seen:
                raise ConfigError(
                    f"ids must be unique, got {key!r} again at {source}; remove that line"
                )
            seen.add(key)
            yield key, line


def ids_in(path: Path) -> set[str]:
    return {key for key, _ in read_results(path)}


def move_results(part: Path, whole: Path) -> None:
    """Move the results from one file to the end of another.

    The move can be repeated if the process is killed at any point.
    """
    cut_torn_line(part)
    moved_ids = ids_in(whole)
    _append(whole, b"".join(line for key, line in read_results(part) if key not in moved_ids))
    part.unlink()


@dataclass(frozen=True)
class Job:
    """The rows to decode, the output, and the run folder.

    The folder `<output>.run` has three kinds of files. `manifest.json` contains a digest of the
    prompts, the settings and the seed. `rank-N.jsonl` contains results of rank N before they are
    moved to the output. `begun-N.jsonl` contains the ids of each batch that rank N has started, the
    running batch last.
    """

    rows: Sequence[Row]  # rows in the order of the prompts
    output: Path  # file for the results, one line each
    # settings that affect texts, as JSON values; must be equal in a resumed run
    settings: Mapping[str, Any]
    seed: int | None = None  # seed of the data set; None to draw a seed and store it for later runs
    is_ordered: bool = False  # whether to sort the output in the order of the prompts
    # handling of finished rows if prompts or settings have changed: "refuse", "keep", "restart"
    if_changed: str = "refuse"

    def __post_init__(self) -> None:
        is_seed = Check(
            "be an int", lambda seed: seed is None or is_int(seed), "leave it out for a random one"
        )
        is_seed("seed", self.seed)
        one_of("keep", "refuse", "restart")("if_changed", self.if_changed)

    @property
    def folder(self) -> Path:
        return self.output.with_name(f"{self.output.name}.run")

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    def part(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.jsonl"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the output against other runs; the lock is released if the process is killed.

        The run folder is removed at the end if no row was started.
        """
        if self.output.exists() and not self.manifest.exists():
            raise ConfigError(
                f"the output must be new or written by an earlier run, got {self.output} without "
                f"{self.manifest}; "
                "choose another output, or remove it"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = filelock.FileLock(self.folder / "lock").acquire(timeout=0)
        except filelock.Timeout:
            raise ConfigError(
                f"{self.output} must have one run at a time, got another one; wait for it, or "
                "choose another output"
            ) from None
        with lock:
            try:
                yield
            finally:
                if not self.output.exists() and not any(self.folder.glob("*.jsonl")):
                    shutil.rmtree(self.folder)

    def begin(self) -> None:
        """Repair the files of an earlier run, and compare its prompts and settings."""
        before = self._read_manifest()
        seed = self.seed
        if seed is None:
            seed = secrets.randbits(62) if before is None else before["seed"]
        settings = json.loads(json.dumps(dict(self.settings)))
        manifest = {
            "format": _FORMAT,
            "prompts": digest_of(self.rows),
            "settings": settings,
            "seed": seed,
        }
        changes = [] if before is None else _changes(before, manifest)
        files = (*self.folder.glob("begun-*.jsonl"), self.output)
        for path in files:
            cut_torn_line(path)
        self._gather_parts()
        if changes and self.if_changed == "restart":
            for path in files:
                path.unlink(missing_ok=True)
        finished = ids_in(self.output)
        if changes and finished and self.if_changed == "refuse":
            raise ConfigError(
                f"{self.output} must be resumed with the same prompts and settings, got other "
                f"{', '.join(changes)}; "
                "choose another output, or set --if-changed (if_changed in Python) to keep or to "
                "restart"
            )
        unknown = sorted(finished - {row.key for row in self.rows})
        if unknown:
            raise ConfigError(
                f"ids in {self.output} must be ids of the prompts, got {', '.join(unknown[:3])}; "
                "remove those lines"
            )
        replace_file(
            self.manifest, [json.dumps(manifest, indent=2, ensure_ascii=False).encode(), b"\n"]
        )

    def begun_seed(self) -> int:
        """Return the seed written by `begin`."""
        manifest = self._read_manifest()
        if manifest is None:
            raise ConfigError(
                f"all ranks must share the folder of the output, got no {self.manifest}; use a "
                "shared file system"
            )
        return int(manifest["seed"])

    def result_paths(self) -> list[Path]:
        """List the files with finished rows: the output, and files in the run folder."""
        has_parts = any(self.folder.glob("rank-*.jsonl"))
        return [self.output] * self.output.exists() + [self.folder] * has_parts

    def record_begun(self, rank: int, rows: Sequence[Row]) -> None:
        append_json(self.folder / f"begun-{rank}.jsonl", [{"ids": [row.key for row in rows]}])

    def complete(self) -> None:
        """Collect the results of all ranks; the output stays readable at any time."""
        self._gather_parts()
        keys, finished = [row.key for row in self.rows], ids_in(self.output)
        missing = [key for key in keys if key not in finished]
        if missing:
            raise ConfigError(
                f"every prompt must have a result, got none for {len(missing)} "
                f"({', '.join(missing[:3])}); choose an "
                "output on a file system that all ranks share"
            )
        if self.is_ordered:
            lines = dict(read_results(self.output))
            if keys != list(lines):
                replace_file(self.output, [lines[key] for key in keys])

    def _gather_parts(self) -> None:
        for part in sorted(self.folder.glob("rank-*.jsonl")):
            move_results(part, self.output)

    def _read_manifest(self) -> dict[str, Any] | None:
        if not self.manifest.exists():
            return None
        try:
            manifest = json.loads(self.manifest.read_text(encoding="utf-8-sig"))
        except json.JSONDecodeError:
            manifest = None
        if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
            raise ConfigError(
                f"{self.manifest} must have format {_FORMAT}, got another one; choose another "
                "output"
            )
        return manifest


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Describe the differences between two manifests, with both values."""
    changes = ["prompts"] if before["prompts"] != after["prompts"] else []
    old, new = ({"seed": manifest["seed"], **manifest["settings"]} for manifest in (before, after))
    names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    return changes + [f"{name} ({new.get(name)!r}, was {old.get(name)!r})" for name in names]
