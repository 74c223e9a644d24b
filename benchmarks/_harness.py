"""What every benchmark shares: alternating runs, spreads, and results as JSON with what made them."""

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

Way = Callable[[], Any]


def alternate(ways: dict[str, Way], repeats: int, description: str = "") -> dict[str, list[float]]:
    """Seconds of `repeats` runs of each way, taken in turn so that all meet the same machine."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    with tqdm(total=repeats * len(order), desc=description, leave=False) as bar:
        for repeat in range(repeats):
            for name in order if repeat % 2 == 0 else reversed(order):
                begin = time.perf_counter()
                ways[name]()
                seconds[name].append(time.perf_counter() - begin)
                bar.update()
    return seconds


def spread(values: list[float]) -> dict[str, float]:
    """Minimum, median and maximum."""
    return {"min": min(values), "median": median(values), "max": max(values)}


def ratios(theirs: list[float], ours: list[float]) -> dict[str, float]:
    """How many times faster `ours` is, run by run."""
    return spread([one / other for one, other in zip(theirs, ours, strict=True)])


def circumstances() -> dict[str, Any]:
    """Versions, device and commit."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    model = [line.split(":", 1)[1].strip() for line in _cpu_info() if line.startswith("model name")]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else (model or [platform.machine()])[0]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device,
        "threads": torch.get_num_threads(),
        "commit": commit.stdout.strip() or "unknown",
        "date": datetime.now(UTC).date().isoformat(),
    }


def write_results(name: str, args: argparse.Namespace, rows: list[dict[str, Any]]) -> Path:
    """Write `benchmarks/results/<name>.json`."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    arguments = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    content = {"circumstances": circumstances(), "arguments": arguments, "rows": rows}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
