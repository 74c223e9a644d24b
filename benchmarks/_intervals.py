"""Geometric means of ratios, and their bootstrap intervals."""

from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive values, at least one."""
    return float(np.exp(np.mean(np.log(values))))


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The percentile interval of the geometric mean over resampled values, `CONFIDENCE` wide."""
    logs = np.log(values)
    # [resamples]
    means = np.random.default_rng(seed).choice(logs, (RESAMPLES, len(logs))).mean(axis=1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(np.exp(low)), float(np.exp(high))


def ratio_summary(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Pairwise ratios: geometric mean with its interval, least, median and greatest."""
    ratios = [
        numerator / denominator
        for numerator, denominator in zip(numerators, denominators, strict=True)
    ]
    low, high = bootstrap_interval(ratios)
    least, middle, greatest = min(ratios), float(np.median(ratios)), max(ratios)
    return {
        "mean": geometric_mean(ratios),
        "low": low,
        "high": high,
        "min": least,
        "median": middle,
        "max": greatest,
    }
