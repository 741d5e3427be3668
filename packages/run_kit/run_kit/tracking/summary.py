"""Summary statistics of a metric over a run, such as means of the first and last steps. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .metrics_table import MetricsTable
from .panels import is_measured

_MEASURES = (
    ("critic/score/mean", "score, last five", "{:.4f}"),
    ("val/accuracy", "held-out accuracy, last", "{:.4f}"),
    ("perf/throughput", "tokens/s per device, last five", "{:,.0f}"),
    ("timing_s/step", "s a step, last five", "{:.3g}"),
    ("perf/max_memory_reserved_gb", "peak reserved GB of a rank", "{:.2f}"),
    ("memory/host_peak_gib", "peak host GiB", "{:.2f}"),
    ("rollout/log_prob_mismatch", "log-prob gap, last five", "{:.2g}"),
)


@dataclass(frozen=True, kw_only=True)
class MetricSummary:
    """A metric over a run. Values that are not finite are left out."""

    num_values: int
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


def summarize(values: Sequence[float]) -> MetricSummary:
    """First and last means over five values, their difference, extremes and the last value."""
    finite = _finite(values)
    first, last = tail_mean(finite[:5]), tail_mean(finite)
    return MetricSummary(
        num_values=len(values),
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


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One number of each run, nan where a run does not have the metric; `form` writes it with `str.format`."""

    metric: str
    title: str
    form: str
    values: tuple[float, ...]

    @property
    def texts(self) -> list[str]:
        """The values as text, empty where a run does not have the metric."""
        return ["" if math.isnan(value) else self.form.format(value) for value in self.values]


def overview(tables: Sequence[MetricsTable]) -> list[Measure]:
    """The number of steps of several runs and their main metrics, without those that no run measured."""
    steps = tuple(float(max((step for step in table.steps if step > 0), default=0)) for table in tables)
    measures = [Measure(metric="step", title="steps", form="{:.0f}", values=steps)]
    for metric, title, form in _MEASURES:
        series = [table.series(metric)[1] for table in tables]
        if is_measured(metric, [value for values in series for value in values]):
            numbers = tuple(_shown(values, title) for values in series)
            measures.append(Measure(metric=metric, title=title, form=form, values=numbers))
    return measures


def _shown(values: Sequence[float], title: str) -> float:
    if title.startswith("peak"):
        return max(values, default=math.nan)
    return tail_mean(values, 1 if title.endswith("last") else 5)
