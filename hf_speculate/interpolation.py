"""Linear interpolation between the sizes that were measured."""

from bisect import bisect_left
from collections.abc import Mapping


def between(by_size: Mapping[int, float], size: int) -> float:
    """The value of a size, on a line between its two neighbours; outside of all sizes, that of the nearest.

    Args:
        by_size: values of at least one size.
        size: the size that is asked for.
    """
    if size in by_size:
        return by_size[size]
    measured = sorted(by_size)
    right = bisect_left(measured, size)
    if right in (0, len(measured)):
        return by_size[measured[min(right, len(measured) - 1)]]
    below, above = measured[right - 1], measured[right]
    share = (size - below) / (above - below)
    return (1 - share) * by_size[below] + share * by_size[above]
