"""Computes time series and distributions by pure functions, whose results are bounded in size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]
Span = tuple[float, float]
CURVE_POINTS = 240
"""Number of points in a curve over time. A screen cannot show more."""


class Spread(msgspec.Struct, kw_only=True):
    """Distribution of a sample of numbers. All fields are 0 for an empty sample."""

    n: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    total: float = 0.0


class Bin(msgspec.Struct, kw_only=True):
    """Histogram bin: the count of numbers in ``[low, high)``. The last bin includes ``high``."""

    low: float
    high: float
    count: int


def spread(values: Floats | Integers) -> Spread:
    """Summarises the distribution of numbers. Ignores NaN."""
    finite = np.asarray(values, np.float64)
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        return Spread()
    p50, p90, p99 = np.quantile(finite, (0.5, 0.9, 0.99)).tolist()
    return Spread(
        n=len(finite),
        mean=significant(float(finite.mean())),
        p50=significant(p50),
        p90=significant(p90),
        p99=significant(p99),
        max=significant(float(finite.max())),
        total=round(float(finite.sum()), 3),
    )


def significant(value: float) -> float:
    """Rounds to six significant digits, so that files of figures are readable and comparable."""
    return float(f"{value:.6g}")


def edges_of(values: Floats, bars: int = 30) -> Floats:
    """Returns the edges of at most ``bars`` histogram bins over finite numbers. If there are only a few distinct
    integers, each gets its own bin."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return np.array([0.0, 1.0])
    low, high = float(finite.min()), float(finite.max())
    if high - low < bars and (finite == np.round(finite)).all():
        return np.arange(low - 0.5, high + 1.0, 1.0)
    return np.linspace(low, high if high > low else low + 1.0, bars + 1)


def histogram(values: Floats, edges: Floats) -> list[Bin]:
    """Returns the non-empty bins of a histogram."""
    counts, _ = np.histogram(values[np.isfinite(values)], edges)
    return [
        Bin(low=significant(low), high=significant(high), count=count)
        for count, (low, high) in zip(counts.tolist(), pairwise(edges.tolist()), strict=True)
        if count
    ]


def mean_level(starts: Floats, ends: Floats, edges: Floats, weights: Floats | None = None) -> Floats:
    """Returns the mean number of concurrent spans in each interval. Shape (k).

    Args:
        starts: Start of each span in seconds. Shape (n).
        ends: End of each span in seconds. Shape (n).
        edges: Edges of k adjacent intervals in seconds, ascending. Shape (k+1).
        weights: Weight of each span. Shape (n). Default: 1.
    """
    weights = np.ones(len(starts)) if weights is None else weights

    def integral(times: Floats) -> Floats:
        order = np.argsort(times)
        counted = np.concatenate([[0.0], np.cumsum(weights[order])])
        summed = np.concatenate([[0.0], np.cumsum(weights[order] * times[order])])
        before = np.searchsorted(times[order], edges)
        return counted[before] * edges - summed[before]

    level: Floats = np.diff(integral(starts) - integral(ends)) / np.maximum(np.diff(edges), 1e-9)
    return np.maximum(0.0, level)


def peak_level(starts: Floats, ends: Floats) -> int:
    """Returns the maximum number of concurrent spans. Spans that only touch do not overlap."""
    times = np.concatenate([starts, ends])
    steps = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
    order = np.lexsort((steps, times))
    return int(np.cumsum(steps[order]).max(initial=0))


def lanes(spans: Sequence[Span]) -> list[int]:
    """Assigns each span to the first lane that is free at its start. Spans must be ordered by start."""
    free_at: list[float] = []
    chosen = []
    for start, end in spans:
        lane = next((lane for lane, free in enumerate(free_at) if free <= start), len(free_at))
        if lane == len(free_at):
            free_at.append(end)
        free_at[lane] = end
        chosen.append(lane)
    return chosen


def thinned(count: int, most: int) -> Integers:
    """Returns at most ``most`` evenly spaced integers from 0 to ``count - 1``, including both ends."""
    if count <= most:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))
