"""Make tables from the laboratory's results."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from tests.schedule.laboratory.cells import GAIN

Row = dict[str, Any]
NUM_WORST = 8


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean, or nan without values."""
    logs = [math.log(value) for value in values]
    return math.exp(fmean(logs)) if logs else math.nan


def ours(row: Row) -> float:
    """Return the mean speed in a cell over its seeds."""
    return geometric_mean(row["ours"])


def title(row: Row) -> str:
    """Return the table line that a cell belongs to."""
    if row["group"] not in ("lookup", "model"):
        return row["group"] + (", gain" if row["best"] >= GAIN else ", no gain")
    if row["best"] < GAIN:
        return f"{row['group']}, no gain, N = {row['num_tokens']}"
    return f"{row['group']}, B = {row['num_rows']}, N = {row['num_tokens']}, gain"


def table(rows: Sequence[Row]) -> str:
    """Return a table of geometric means with a line per kind of cell, and the worst in brackets."""
    header = (
        "cells",
        "best constant",
        "transformers",
        "ours",
        "ours/best",
        "ours/transformers",
        "first call",
    )
    lines = [header, ("---",) * len(header)]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["noise"], title(row)), []).append(row)
    for (noise, name), some in sorted(groups.items()):
        to_best = [ours(row) / row["best"] for row in some]
        to_rival = [ours(row) / row["rival"] for row in some if "rival" in row]
        lines.append(
            (
                f"{name}, {noise}: {len(some)}",
                f"{geometric_mean(row['best'] for row in some):.3f}",
                f"{geometric_mean(row['rival'] for row in some if 'rival' in row):.3f}",
                f"{geometric_mean(map(ours, some)):.3f} ({min(map(ours, some)):.3f})",
                f"{geometric_mean(to_best):.3f} ({min(to_best):.3f})",
                f"{geometric_mean(to_rival):.3f} ({min(to_rival, default=math.nan):.3f})",
                (
                    f"{fmean(row['first'] for row in some):.2f} "
                    f"({min(row['first'] for row in some):.2f})"
                ),
            )
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def worst(rows: Sequence[Row]) -> str:
    """Return the cells that are farthest behind their best constant."""
    ordered = sorted(rows, key=lambda row: ours(row) / row["best"])[:NUM_WORST]
    return "\n".join(
        f"{ours(row) / row['best']:.3f} = {ours(row):.3f} / {row['best']:.3f}  {row['cell']}, "
        f"{row['noise']}"
        for row in ordered
    )
