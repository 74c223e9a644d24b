"""Checks and measurements on a CUDA device, in six parts of at most eight minutes each.

    python benchmarks/on_gpu.py --part 1 --out FOLDER
    python benchmarks/on_gpu.py --part 1 --out FOLDER --dry-run  # tiny models on a simulated device, no figures

Parts: 1 versions, attention backends, copy rate and the tests that need a GPU; 2 exactness in half precision, with
cuDNN attention allowed and not; 3 waits and launches of a round; 4 times of attention and the kernels in CUDA graphs; 5
an 8B target with a 1B draft whose acceptance an oracle fixes; 6 seconds of compilation.

`FOLDER/on_gpu_<part>.json` is written after every cell and check. The exit status is 1 if a check failed. No network is
needed.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _gpu_parts
from _gpu_device import CudaDevice, Device, DryDevice
from _harness import provenance

LIMIT_S = 480.0  # of a part
PARTS: dict[int, Callable[["Report", Device], None]] = {
    1: _gpu_parts.environment,
    2: _gpu_parts.exactness,
    3: _gpu_parts.round_costs,
    4: _gpu_parts.kernel_times,
    5: _gpu_parts.end_to_end,
    6: _gpu_parts.compilation,
}


class Report:
    """The JSON file of one part, written after every cell and check.

    Args:
        path: the file.
        part: number of the part.
        device: what it runs on.
        limit_s: seconds after which no further cell begins.
    """

    def __init__(self, path: Path, part: int, device: Device, limit_s: float):
        self.path = path
        self.num_failed = 0
        self._end = time.monotonic() + limit_s
        self._content: dict[str, Any] = {
            "environment": provenance(),
            "part": part,
            "is_dry_run": device.is_dry,
            "cells": [],
            "checks": [],
            "left_out": [],
        }
        self._write()

    def begins(self, cell: str) -> bool:
        """Whether there is time for a further cell; notes it as left out if not."""
        if time.monotonic() < self._end:
            return True
        self.leave_out(cell, "no time is left")
        return False

    def cell(self, **values: Any) -> None:
        """Write a measurement."""
        self._content["cells"].append(values)
        print(" ".join(f"{name}={value}" for name, value in values.items()), flush=True)
        self._write()

    def check(self, name: str, is_right: bool, seen: Any) -> None:
        """Write what a check saw."""
        self.num_failed += not is_right
        self._content["checks"].append({"name": name, "is_right": is_right, "seen": seen})
        print(f"{'right' if is_right else 'WRONG'}: {name}: {seen}", flush=True)
        self._write()

    def leave_out(self, cell: str, reason: str) -> None:
        """Note a cell that was not run."""
        self._content["left_out"].append({"cell": cell, "reason": reason})
        print(f"left out: {cell}: {reason}", flush=True)
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self._content, indent=1, default=str) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=sorted(PARTS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on a simulated device")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="begin no cell after this")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.dry_run and "TRITON_INTERPRET" not in os.environ:  # Triton reads it when it is imported
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "TRITON_INTERPRET": "1"})
    device = DryDevice() if args.dry_run else CudaDevice()
    with device:
        report = Report(args.out / f"on_gpu_{args.part}.json", args.part, device, args.limit_s)
        PARTS[args.part](report, device)
    print(f"written to {report.path}; {report.num_failed} checks failed")
    sys.exit(1 if report.num_failed else 0)


if __name__ == "__main__":
    main()
