"""The width of free proposals: the tokens of a lookup that are worth their verification."""

import math
from collections.abc import Container, Mapping, Sequence

from hf_speculate.schedule.base import RowAhead

FIRST_PACE = 1.2  # tokens per round of a row before its first round


def row_worths(rows: Sequence[RowAhead], paces: Mapping[int, float]) -> list[float]:
    """Return [N] plain steps that one more token of each row saves.

    A token of the row that ends last saves a whole step. Which row ends last is not certain, so all
    rows have a share of it, by how far their expected ends lie apart.

    Args:
        rows: the live rows.
        paces: tokens per round of each row, by row id.
    """
    rounds = [row.num_left / paces.get(row.row_id, FIRST_PACE) for row in rows]
    last = max(rounds)
    lateness = [math.exp((num - last) / max(last, 1.0) ** 0.5) for num in rounds]
    return [late / sum(lateness) for late in lateness]


def best_width(
    rows: Sequence[RowAhead],
    worths: Sequence[float],
    step_s: float,
    verifications_s: Sequence[float],
    lengths: Container[int],
) -> tuple[int, float]:
    """Return the width of the round with the most worth, and the seconds that it saves.

    Args:
        rows: the live rows with the probabilities of their proposals.
        worths: [N] plain steps that a token of each row saves.
        step_s: seconds that a plain step is worth.
        verifications_s: [K_max + 1] seconds of a verification by width.
        lengths: the widths to choose from.
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
