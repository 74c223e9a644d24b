"""Width of free proposals: keep only tokens that are worth their verification."""

import math
from collections.abc import Container, Mapping, Sequence

from hf_speculate.schedule.base import RowAhead

FIRST_PACE = 1.2  # assumed tokens per round for a row before its first round


def row_worths(rows: Sequence[RowAhead], paces: Mapping[int, float]) -> list[float]:
    """Return how many plain steps one more token of each row saves, [N].

    A token of the row that ends last saves a whole step. It is uncertain which row ends last, so
    each row gets a share based on the distance between its expected end and the latest one.

    Args:
        rows: Live rows.
        paces: Number of tokens per round, by row id.
    """
    rounds = [row.num_left / paces.get(row.row_id, FIRST_PACE) for row in rows]
    last = max(rounds)
    lateness = [math.exp((num_rounds - last) / max(last, 1.0) ** 0.5) for num_rounds in rounds]
    return [late / sum(lateness) for late in lateness]


def best_width(
    rows: Sequence[RowAhead],
    worths: Sequence[float],
    step_s: float,
    verifications_s: Sequence[float],
    lengths: Container[int],
) -> tuple[int, float]:
    """Return the best width and the time it saves in seconds; 0 and 0.0 if no width saves time.

    Args:
        rows: Live rows with the probabilities of their proposals.
        worths: [N] number of plain steps that a token of each row saves.
        step_s: Value of a plain step in seconds.
        verifications_s: [K_max + 1] seconds of a verification by width.
        lengths: Allowed widths.
    """
    longest = max((len(row.proposed) for row in rows), default=0)
    best, best_s, saved_s = 0, 0.0, 0.0
    for width in range(1, min(longest, len(verifications_s) - 1) + 1):
        saved_s += step_s * sum(
            worth * row.proposed[width - 1]
            for row, worth in zip(rows, worths, strict=True)
            if len(row.proposed) >= width
        )
        value_s = saved_s - (verifications_s[width] - verifications_s[0])
        if width in lengths and value_s > best_s:
            best, best_s = width, value_s
    return best, best_s
