"""Summary statistics of a metric over a run, such as means of the first and last steps. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MetricSummary:
    """A metric over a run. Values that are not finite are left out and counted."""

    num_values: int
    num_not_finite: int
    first_mean: float
    last_mean: float
    change: float
    minimum: float
    maximum: float
    last: float


def _finite(values: Sequence[float]) -> list[float]:
    return [float(value) for value in values if math.isfinite(value)]


def tail_mean(values: Sequence[float], count: int = 5) -> float:
    """Mean of the last `count` finite values (of all, if fewer); nan if there is none."""
    tail = _finite(values)[-count:]
    return math.fsum(tail) / len(tail) if tail else math.nan


def first_mean(values: Sequence[float], count: int = 5) -> float:
    """Mean of the first `count` finite values (of all, if fewer); nan if there is none."""
    return tail_mean(_finite(values)[:count], count)


def summarize(values: Sequence[float], count: int = 5) -> MetricSummary:
    """First and last means over `count` values, their difference, extremes and the last value.

    Raises:
        ValueError: count below 1.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    finite = _finite(values)
    first, last = first_mean(finite, count), tail_mean(finite, count)
    return MetricSummary(
        num_values=len(values),
        num_not_finite=len(values) - len(finite),
        first_mean=first,
        last_mean=last,
        change=last - first,
        minimum=min(finite, default=math.nan),
        maximum=max(finite, default=math.nan),
        last=finite[-1] if finite else math.nan,
    )


def smooth(values: list[float], window: int = 5) -> list[float]:
    """Centered moving average over `window` values, fewer at both ends; nan stays nan and is left out of the others."""
    half, last = window // 2, len(values) - 1
    windows = [values[i - min(half, i, last - i) : i + min(half, i, last - i) + 1] for i in range(len(values))]
    return [
        tail_mean(near, window) if math.isfinite(value) else math.nan
        for value, near in zip(values, windows, strict=True)
    ]
