"""The JSON file of one part of `on_gpu.py`: written after every cell, so that whatever ends the process leaves it."""

import faulthandler
import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

CELL_LIMIT_S = 60.0
NO_TIME = "no time is left"
Content = dict[str, Any]


def file_of(folder: Path, part: str) -> Path:
    """The JSON file of a part."""
    return folder / f"{part}.json"


def read_part(folder: Path, part: str) -> Content:
    """What a part has written so far; nothing if it wrote nothing, or no whole file."""
    try:
        content: Content = json.loads(file_of(folder, part).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content


def num_attempted(content: Content) -> int:
    """How many cells have begun."""
    return len(content.get("attempted", ()))


def end_process_after(seconds: float | None) -> None:
    """Print where every thread is and end the process after so many seconds, whatever it does then; None: do not."""
    if seconds is None:
        faulthandler.cancel_dump_traceback_later()
    else:
        faulthandler.dump_traceback_later(seconds, exit=True)


class Report:
    """Runs the cells of one part and writes what they see.

    A cell that was attempted by an earlier process of the part, which died in it, is not attempted again.

    Args:
        path: the file.
        content: its first entries.
        limit_s: seconds after which no further cell begins.
        recover: called after a cell has failed; whether the device can go on.
        watch: called with the seconds after which a cell that hangs may end the process, and with None after it.
        is_resumed: whether to go on where the file ends.
        say: prints a line.
        clock: seconds.
    """

    def __init__(
        self,
        path: Path,
        content: Content,
        limit_s: float,
        recover: Callable[[], bool] = lambda: True,
        watch: Callable[[float | None], None] = lambda seconds: None,
        is_resumed: bool = False,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.path = path
        self._end = clock() + limit_s
        self._recover, self._watch, self._say, self._clock = recover, watch, say, clock
        empty: Content = {"is_finished": False, "attempted": [], "ended": [], "cells": [], "checks": [], "left_out": []}
        earlier = read_part(path.parent, path.stem) if is_resumed else {}
        self._content: Content = content | empty | earlier
        for cell in self._content["attempted"][len(self._content["ended"]) :]:
            self._content["ended"].append(cell)
            self.check(f"{cell}: runs", False, "the process ended in it, see the log")
        self._write()

    @property
    def num_failed(self) -> int:
        """Checks that failed, those of earlier processes included."""
        return sum(not check["is_right"] for check in self._content["checks"])

    @property
    def remaining_s(self) -> float:
        """Seconds until no further cell begins."""
        return self._end - self._clock()

    def attempt(
        self, cell: str, run: Callable[[], object], limit_s: float = CELL_LIMIT_S, needs_s: float = 0.0
    ) -> None:
        """Run a cell unless too little time is left; an error in it is a failed check.

        Args:
            cell: its name, different from all others of the part.
            run: what it does.
            limit_s: seconds after which it counts as hanging.
            needs_s: seconds that must be left.

        Raises:
            SystemExit: the device cannot go on.
        """
        if cell in self._content["attempted"]:
            return
        if self.remaining_s <= needs_s:
            self.leave_out(cell, NO_TIME)
            return
        self._content["attempted"].append(cell)
        self._write()
        self._say(f"begins: {cell}")
        self._watch(min(limit_s, self.remaining_s))
        can_go_on = True
        try:
            run()
        except Exception as error:  # noqa: BLE001, one cell says nothing of the next
            self._say(traceback.format_exc())
            self.check(f"{cell}: runs", False, f"{type(error).__name__}: {error}"[:2000])
            can_go_on = self._recover()
        self._watch(None)
        self._content["ended"].append(cell)
        self._write()
        if not can_go_on:
            raise SystemExit(f"the device cannot go on after {cell}")

    def cell(self, **values: Any) -> None:
        """Write a measurement."""
        self._content["cells"].append(values)
        self._say(" ".join(f"{name}={shown(value)}" for name, value in values.items()))
        self._write()

    def check(self, name: str, is_right: bool, seen: Any) -> None:
        """Write what a check saw."""
        self._content["checks"].append({"name": name, "is_right": is_right, "seen": seen})
        self._say(f"{'right' if is_right else 'WRONG'}: {name}: {shown(seen)}")
        self._write()

    def leave_out(self, cell: str, reason: str) -> None:
        """Note a cell that was not run."""
        self._content["left_out"].append({"cell": cell, "reason": reason})
        self._say(f"left out: {cell}: {reason}")
        self._write()

    def finish(self) -> None:
        """Note that the part has come to its end."""
        self._content["is_finished"] = True
        self._write()

    def _write(self) -> None:
        """Replace the file in one step: a reader finds a whole one at any time."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text(json.dumps(self._content, indent=1, default=str) + "\n", encoding="utf-8")
        os.replace(scratch, self.path)


def shown(value: Any) -> str:
    """A value in a line of the log."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple) and value and all(isinstance(part, float) for part in value):
        return "[" + ", ".join(f"{part:.4g}" for part in value) + "]"
    return str(value)
