"""Compute geometric means of ratios with bootstrap intervals."""

from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of at least one positive value."""
    return float(np.exp(np.mean(np.log(values))))


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the `CONFIDENCE` percentile interval of the geometric mean over resamples."""
    logs = np.log(values)
    # [resamples]
    means = np.random.default_rng(seed).choice(logs, (RESAMPLES, len(logs))).mean(axis=1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(np.exp(low)), float(np.exp(high))


def ratio_summary(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Summarise pairwise ratios: geometric mean with its interval, minimum, median and maximum."""
    ratios = [
        numerator / denominator
        for numerator, denominator in zip(numerators, denominators, strict=True)
    ]
    low, high = bootstrap_interval(ratios)
    min_ratio, median_ratio, max_ratio = min(ratios), float(np.median(ratios)), max(ratios)
    return {
        "mean": geometric_mean(ratios),
        "low": low,
        "high": high,
        "min": min_ratio,
        "median": median_ratio,
        "max": max_ratio,
    }
