"""What a comparison of runs shows first: their main metrics, and the configuration keys in which they differ. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.differences import differing
from ..config.yaml import YamlError, parse_typed
from ..errors import ReportError
from ..tracking.metrics_table import MetricsTable
from ..tracking.panels import is_measured
from ..tracking.summary import tail_mean

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
class Measure:
    """One number of each run: the mean of a metric's last steps, its last value or its peak."""

    metric: str
    title: str
    form: str
    """How `str.format` writes a value."""
    values: tuple[float, ...]
    """In the order of the runs; nan where a run does not have the metric."""

    @property
    def texts(self) -> list[str]:
        """The values as text, empty where a run does not have the metric."""
        return ["" if math.isnan(value) else self.form.format(value) for value in self.values]


def overview(tables: Sequence[MetricsTable]) -> list[Measure]:
    """The number of steps of several runs and their main metrics, without those that no run measured."""
    steps = tuple(float(max((step for step in table.steps if step > 0), default=0)) for table in tables)
    found = [Measure(metric="step", title="steps", form="{:.0f}", values=steps)]
    for metric, title, form in _MEASURES:
        series = [table.series(metric)[1] for table in tables]
        if is_measured(metric, [value for values in series for value in values]):
            values = tuple(_summary(values, title) for values in series)
            found.append(Measure(metric=metric, title=title, form=form, values=values))
    return found


def _summary(values: Sequence[float], title: str) -> float:
    if title.startswith("peak"):
        return max(values, default=math.nan)
    return tail_mean(values, 1 if title.endswith("last") else 5)


def config_differences(config_texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Dotted key -> its value in each run, for the keys that differ.

    Args:
        config_texts: label -> text of the run's config.yaml.

    Raises:
        ReportError: a text that is no configuration; names the run.
    """
    return differing({label: _parsed(text, label) for label, text in config_texts.items()})


def _parsed(text: str, label: str) -> Any:
    try:
        return parse_typed(text, None)
    except YamlError as error:
        raise ReportError(f"config.yaml of {label}: {error}") from None


def run_labels(folders: Sequence[Path | str]) -> dict[str, Path | str]:
    """Label -> run folder: the folder's name, or its whole path where names are the same."""
    names = [Path(folder).resolve().name for folder in folders]
    return {
        name if names.count(name) == 1 else str(folder): folder for name, folder in zip(names, folders, strict=True)
    }
