"""Which published checkpoints stay: a pure decision over steps and their metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from .errors import CheckpointUsageError

__all__ = ["Retention", "steps_to_delete"]


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What to keep. A checkpoint stays when any rule keeps it; the newest one always stays, to resume from.

    With no rule at all everything stays.
    """

    keep_last: int | None = None
    """The newest so many, at least 1. None: no such rule."""
    keep_every: int | None = None
    """Every step that is a multiple of this, for ever. None: no such rule."""
    keep_best: int | None = None
    """The best so many by `metric`, at least 1; of equals the newer. None: no such rule."""
    metric: str | None = None
    """The name among the metrics given to `publish`. A checkpoint without it, or with NaN, is never a best one."""
    mode: Literal["max", "min"] = "max"
    """Whether the largest or the smallest value is best."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise CheckpointUsageError(f"{name}={value!r}: must be at least 1, or None")
        if (self.keep_best is None) != (self.metric is None):
            raise CheckpointUsageError(
                f"keep_best={self.keep_best!r}, metric={self.metric!r}: give both or neither; the best are chosen by "
                "the metric"
            )
        if self.mode not in ("max", "min"):
            raise CheckpointUsageError(f"mode={self.mode!r}: must be 'max' or 'min'")

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever deleted."""
        return self.keep_last is None and self.keep_every is None and self.keep_best is None


def steps_to_delete(
    steps: Iterable[int], metrics: Mapping[int, Mapping[str, float]], rule: Retention, *, spare: int | None = None
) -> list[int]:
    """The steps that no rule keeps, oldest first. `metrics` by step; `spare` stays whatever the rules say."""
    ordered = sorted(steps)
    if rule.keeps_all:
        return []
    kept = {*ordered[-(rule.keep_last or 1) :], spare}
    if rule.keep_every is not None:
        kept |= {step for step in ordered if step % rule.keep_every == 0}
    if rule.keep_best is not None and rule.metric is not None:
        kept |= set(best_steps(metrics, rule.metric, rule.mode)[: rule.keep_best])
    return [step for step in ordered if step not in kept]


def best_steps(metrics: Mapping[int, Mapping[str, float]], metric: str, mode: Literal["max", "min"]) -> list[int]:
    """The steps that have the metric, best first; of equals the newer first."""
    sign = 1.0 if mode == "max" else -1.0
    ranked = [
        (sign * values[metric], step)
        for step, values in metrics.items()
        if metric in values and not math.isnan(values[metric])
    ]
    return [step for _, step in sorted(ranked, reverse=True)]
