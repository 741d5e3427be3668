"""Paired differences over seeds: mean, confidence interval, verdict. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

Verdict = Literal["pass", "fail", "inconclusive", "not measured"]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A closed interval; either end may be infinite."""

    low: float
    high: float

    def contains(self, other: "Interval") -> bool:
        """Whether it contains `other`."""
        return self.low <= other.low and other.high <= self.high

    def touches(self, other: "Interval") -> bool:
        """Whether the intervals overlap."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Mean of the differences over seeds, its confidence interval and the verdict."""

    num_seeds: int
    mean: float
    std: float | None
    interval: Interval | None
    verdict: Verdict


def judge(differences: Sequence[float], allowed: Interval, *, confidence: float) -> Judgement:
    """Whether the mean difference lies in `allowed`.

    `pass` if the confidence interval of the mean lies inside `allowed`, `fail` if it lies outside, else
    `inconclusive`. One seed has no interval: its difference decides.

    Args:
        differences: one per seed; non-finite values were not measured.
    """
    found = [value for value in differences if math.isfinite(value)]
    if not found:
        return Judgement(num_seeds=0, mean=math.nan, std=None, interval=None, verdict="not measured")
    mean, std = fmean(found), stdev(found) if len(found) > 1 else None
    half = 0.0 if std is None else student_t_quantile(confidence, len(found) - 1) * std / math.sqrt(len(found))
    interval = Interval(low=mean - half, high=mean + half)
    verdict: Verdict = "inconclusive" if allowed.touches(interval) else "fail"
    if allowed.contains(interval):
        verdict = "pass"
    return Judgement(
        num_seeds=len(found), mean=mean, std=std, interval=None if std is None else interval, verdict=verdict
    )


def student_t_quantile(confidence: float, degrees: int) -> float:
    """The t with P(|T| <= t) = confidence for Student's distribution with `degrees` degrees of freedom."""
    if not 0 < confidence < 1 or degrees < 1:
        raise ValueError(f"confidence {confidence} must be between 0 and 1, degrees {degrees} at least 1")
    low, high = 0.0, 1.0
    while _student_t_within(high, degrees) < confidence:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_t_within(middle, degrees) < confidence else (low, middle)
    return (low + high) / 2


def _student_t_within(t: float, degrees: int) -> float:
    """P(|T| <= t): the finite sums for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
