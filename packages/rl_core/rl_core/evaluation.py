"""Statistics of an evaluation: pass@k, majority vote, bootstrap intervals of a mean over prompts.

Shapes: P prompts. All results are float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import ShapeError, require

FloatArray = npt.NDArray[np.float64]

_VALUES_AT_ONCE = 1 << 22
"""Resampled values in memory at a time: 32 MiB."""


def pass_at_k(num_right_P: npt.ArrayLike, num_samples_P: npt.ArrayLike, k: int) -> FloatArray:
    """Probability that at least one of k samples is right, estimated without bias from n >= k samples. [P] -> [P].

        pass@k = 1 - C(n - c, k) / C(n, k) = 1 - prod_{i = n - c + 1}^{n} (1 - k / i)

    with c right ones of n samples. The average over all ways to choose k of the n samples.
    Source: Chen et al. 2021, arXiv:2107.03374, section 2.1.
    Raises `ShapeError` for shapes, `ValueError` for k < 1, for fewer than k samples, and for c outside of 0..n.
    """
    right_P, samples_P = np.asarray(num_right_P, np.int64), np.asarray(num_samples_P, np.int64)
    if right_P.ndim != 1 or right_P.shape != samples_P.shape:
        raise ShapeError(field="num_right_P", value=right_P.shape, allowed=f"{samples_P.shape} of num_samples_P, [P]")
    require(k >= 1, "k", k, "1 or more")
    require(not (samples_P < k).any(), "num_samples_P", samples_P.min(initial=k), f"k={k} or more for every prompt")
    is_possible = not ((right_P < 0) | (right_P > samples_P)).any()
    require(is_possible, "num_right_P", right_P.tolist(), "0 to the number of samples for every prompt")
    return np.array([_pass_at_k(int(c), int(n), k) for c, n in zip(right_P, samples_P, strict=True)], np.float64)


def _pass_at_k(num_right: int, num_samples: int, k: int) -> float:
    if num_samples - num_right < k:  # the product would have a factor of 0, or cross it
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(num_samples - num_right + 1, num_samples + 1)))


def majority_vote(votes: Sequence[int], is_right: Sequence[bool]) -> float:
    """Probability that the most frequent answer of one prompt is right; ties are broken at random.

    Args:
        votes: for each sample a number that is equal for equal answers; negative for a sample without an answer, which
            does not vote. Nobody votes: 0.
        is_right: whether each sample is right. Samples with the same answer may differ, if more than the answer is
            scored: the answer then is as right as the mean of its samples.

    Source: Wang et al. 2023, Self-consistency, arXiv:2203.11171, section 2 (the unweighted sum).
    Raises `ShapeError` for different lengths.
    """
    if len(votes) != len(is_right):
        raise ShapeError(field="votes", value=len(votes), allowed=f"{len(is_right)} values, as is_right")
    marks: dict[int, list[bool]] = {}
    for vote, right in zip(votes, is_right, strict=True):
        if vote >= 0:
            marks.setdefault(vote, []).append(right)
    most = max(map(len, marks.values()), default=0)
    winners = [sum(votes_right) / most for votes_right in marks.values() if len(votes_right) == most]
    return sum(winners) / len(winners) if winners else 0.0


@dataclass(frozen=True, kw_only=True)
class BootstrapMean:
    """The mean of `num_values` values, and a confidence interval of it."""

    mean: float
    low: float
    high: float
    num_values: int


def bootstrap_mean(
    values_P: npt.ArrayLike, *, num_resamples: int = 10_000, confidence: float = 0.95, seed: int = 0
) -> BootstrapMean:
    """The mean over prompts with its percentile bootstrap interval: prompts are drawn with replacement.

    Samples of one prompt depend on each other, so `values_P` has one value for each prompt. Values that are paired
    differences of two models on the same prompts give the paired bootstrap of the difference. The same arguments give
    the same interval.
    Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, section 13.3.
    Raises `ShapeError` for no values or a shape other than [P], `ValueError` for a value that is not finite, fewer than
    one resample, or a confidence outside of 0 to 1.
    """
    values = np.asarray(values_P, np.float64)
    if values.ndim != 1 or not len(values):
        raise ShapeError(field="values_P", value=values.shape, allowed="[P] with at least one value")
    require(bool(np.isfinite(values).all()), "values_P", values.tolist(), "finite values")
    require(num_resamples >= 1, "num_resamples", num_resamples, "1 or more")
    require(0 < confidence < 1, "confidence", confidence, "between 0 and 1")
    rng, rows = np.random.default_rng(seed), max(1, _VALUES_AT_ONCE // len(values))
    parts = [min(rows, num_resamples - start) for start in range(0, num_resamples, rows)]
    means = [values[rng.integers(len(values), size=(part, len(values)))].mean(axis=1) for part in parts]
    low, high = np.quantile(np.concatenate(means), [(1 - confidence) / 2, (1 + confidence) / 2])
    return BootstrapMean(mean=float(values.mean()), low=float(low), high=float(high), num_values=len(values))
