"""Rows that hold every pair of two axes' values: `python -m tests.pairs` writes those of `tests/cases.py`.

Write them anew after a value or an axis was added.
"""

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

ROWS = Path(__file__).with_name("pairs.json")
NUM_TRIES = 60  # rows drawn for each that is kept
Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]  # (axis, value) twice


def pairs_of(axes: Mapping[str, Sequence[str]], excluded: Mapping[Pair, str]) -> set[Pair]:
    """Every pair that rows must hold."""
    found = {
        ((one, value), (other, another))
        for one, other in itertools.combinations(axes, 2)
        for value in axes[one]
        for another in axes[other]
    }
    return found - set(excluded)


def pairs_in(row: Row) -> set[Pair]:
    """The pairs that one row holds."""
    return set(itertools.combinations(row.items(), 2))


def cover(axes: Mapping[str, Sequence[str]], excluded: Mapping[Pair, str], seed: int = 0) -> list[Row]:
    """Rows without an excluded pair that hold all others; the best of some random rows is taken each time."""
    draw, missing, rows = random.Random(seed), pairs_of(axes, excluded), []
    while missing:
        start = dict(draw.choice(sorted(missing)))
        tried = [row for _ in range(NUM_TRIES) if (row := _filled(axes, excluded, start, missing, draw))]
        if not tried:
            raise ValueError(f"no row holds {start}: exclude it, or exclude fewer pairs beside it")
        best = max(tried, key=lambda row: len(pairs_in(row) & missing))
        missing -= pairs_in(best)
        rows.append(best)
    return rows


def _filled(
    axes: Mapping[str, Sequence[str]], excluded: Mapping[Pair, str], row: Row, missing: set[Pair], draw: random.Random
) -> Row | None:
    """The row with values for all axes, each the one that adds most missing pairs; None if every value is excluded."""
    for name in draw.sample(sorted(axes.keys() - row.keys()), len(axes) - len(row)):
        found = []
        for value in draw.sample(axes[name], len(axes[name])):
            longer = {axis: {**row, name: value}[axis] for axis in axes if axis in row or axis == name}
            if not pairs_in(longer) & excluded.keys():
                found.append(longer)
        if not found:
            return None
        row = max(found, key=lambda one: len(pairs_in(one) & missing))
    return row


def read() -> list[Row]:
    """The rows of the file."""
    text: list[Row] = json.loads(ROWS.read_text(encoding="utf-8"))
    return text


if __name__ == "__main__":
    from tests.cases import AXES, EXCLUDED

    found = min((cover(AXES, EXCLUDED, seed) for seed in range(20)), key=len)
    lines = ",\n".join(json.dumps(row) for row in found)
    ROWS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"wrote {len(found)} rows")
