"""Decides which published checkpoints to keep: a pure function of steps and metrics."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from .errors import CheckpointUsageError


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Rules that select the checkpoints to keep. Any rule keeps a checkpoint; the newest one is always kept.

    Without any rule all are kept.
    """

    keep_last: int | None = None
    """Keep this many of the newest checkpoints, at least 1. None: no such rule."""
    keep_every: int | None = None
    """Keep every step that is a multiple of this, indefinitely. None: no such rule."""
    keep_best: int | None = None
    """Keep this many of the best checkpoints by `metric`, at least 1; ties prefer the newer. None: no such rule."""
    metric: str | None = None
    """A name from the metrics passed to `publish`. A checkpoint without it, or with NaN, never counts as best."""
    mode: Literal["max", "min"] = "max"
    """`max` if the largest value is best, `min` if the smallest is."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise CheckpointUsageError(field=name, value=value, allowed="at least 1, or None")
        if (self.keep_best is None) != (self.metric is None):
            raise CheckpointUsageError(
                f"keep_best is {self.keep_best!r}",
                field="metric",
                value=self.metric,
                allowed="both or neither; the metric ranks the checkpoints",
            )
        if self.mode not in ("max", "min"):
            raise CheckpointUsageError(field="mode", value=self.mode, allowed="'max' or 'min'")


def steps_to_delete(
    steps: Iterable[int],
    metrics_of: Callable[[int], Mapping[str, float]],
    rule: Retention,
    *,
    keep: int | None = None,
) -> list[int]:
    """The steps that no rule keeps, oldest first; `keep` is kept whatever the rules say."""
    ordered = sorted(steps)
    if rule.keep_last is None and rule.keep_every is None and rule.keep_best is None:
        return []
    kept = {*ordered[-(rule.keep_last or 1) :], keep}
    if rule.keep_every is not None:
        kept |= {step for step in ordered if step % rule.keep_every == 0}
    if rule.keep_best is not None and rule.metric is not None:
        sign = 1.0 if rule.mode == "max" else -1.0
        values = {step: sign * metrics_of(step).get(rule.metric, math.nan) for step in ordered}
        ranked = sorted((value, step) for step, value in values.items() if not math.isnan(value))
        kept |= {step for _, step in ranked[-rule.keep_best :]}
    return [step for step in ordered if step not in kept]
