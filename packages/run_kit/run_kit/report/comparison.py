"""Comparison page: metrics of several runs overlaid, and the config keys in which they differ."""

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from ..config.differences import differing
from ..config.yaml import YamlError, parse_typed
from ..errors import ReportError
from ..tracking.metrics_table import MetricsTable, atomic_write, columns_of
from ..tracking.panels import Section, choose_panels, single_panels
from ..tracking.summary import tail_mean
from .data import MAX_ROLLOUTS, read_run, spread
from .page import METRIC_FILTER, assemble, figure, figure_grid, number_table, phase_order, rollouts_section
from .svg import Series, line_chart, stack_chart

_OVERVIEW = (
    ("critic/score/mean", "score, last five", "{:.4f}"),
    ("val/accuracy", "held-out accuracy, last", "{:.4f}"),
    ("perf/throughput", "tokens/s per device, last five", "{:,.0f}"),
    ("timing_s/step", "s a step, last five", "{:.3g}"),
    ("perf/max_memory_reserved_gb", "peak reserved GB of a rank", "{:.2f}"),
    ("memory/host_peak_gib", "peak host GiB", "{:.2f}"),
    ("rollout/log_prob_mismatch", "log-prob gap, last five", "{:.2g}"),
)
_PEAKS = ("perf/max_memory_reserved_gb", "memory/host_peak_gib")


def write_comparison(runs: Mapping[str, Path | str], path: Path | str, *, title: str = "Comparison") -> Path:
    """Write one page about several run folders and return its path.

    Args:
        runs: label -> run folder, in the order of the page.

    Raises:
        ReportError: fewer than two runs, a missing folder, no metrics, or malformed files.
    """
    if len(runs) < 2:
        raise ReportError(f"a comparison needs two run folders or more, got {len(runs)}")
    data = {label: read_run(Path(folder)) for label, folder in runs.items()}
    tables = {label: run.table for label, run in data.items()}
    each = MAX_ROLLOUTS // len(data)
    records: list[dict[str, Any]] = [
        {**record, "run": label} for label, run in data.items() for record in spread(run.rollouts, each)
    ]
    records.sort(key=lambda record: record["step"])
    sections = [
        ("overview", "Overview", _overview(tables)),
        ("config", "What the runs do not share", _differences({label: run.config_text for label, run in data.items()})),
        ("curves", "Curves", _figures(tables, "curves")),
        ("time", "Where the time goes", _time(tables)),
        ("memory", "Memory", _figures(tables, "memory")),
        ("mismatch", "Rollout and trainer", _figures(tables, "mismatch")),
        ("rollouts", "Rollouts", rollouts_section(records, sum(run.num_rollouts for run in data.values()))),
        ("metrics", "All metrics", _metrics(tables)),
    ]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, assemble(title, f'<p class="soft">{len(data)} runs</p>', sections, records))
    return path


def _figures(tables: Mapping[str, MetricsTable], section: Section) -> str:
    figures = []
    for panel in single_panels(columns_of(tables.values())):
        (name,) = panel.metrics
        if panel.section == section:
            found = {label: table.series(name, gaps=True) for label, table in tables.items()}
            series = [Series(label=label, steps=steps, values=values) for label, (steps, values) in found.items()]
            chart = line_chart(series, title=name)
            figures.append(figure(panel, series, chart) if chart else "")
    return figure_grid(figures)


def _overview(tables: Mapping[str, MetricsTable]) -> str:
    # Memory of GPUs is 0 on the CPU; any other 0 is a result.
    found = {entry: [v for table in tables.values() for v in table.series(entry[0])[1]] for entry in _OVERVIEW}
    known = [entry for entry, values in found.items() if (any(values) if entry[0] in _PEAKS else values)]
    rows = []
    for label, table in tables.items():
        cells = [str(max((step for step in table.steps if step > 0), default=0))]
        for name, words, form in known:
            values = table.series(name)[1]
            last = 1 if words.endswith("last") else 5
            cells.append("" if not values else form.format(max(values) if name in _PEAKS else tail_mean(values, last)))
        rows.append((label, cells))
    return number_table(("run", "steps", *(words for _, words, _ in known)), rows)


def _time(tables: Mapping[str, MetricsTable]) -> str:
    """Mean seconds per step: one bar per run, and a table of phases with one column per run."""
    columns = columns_of(tables.values())
    phases = phase_order([name for name in columns if name.startswith("timing_s/")])
    means = {name: [fmean(table.series(name)[1] or [math.nan]) for table in tables.values()] for name in phases}
    if not means:
        return ""
    chart = ""
    panel = next((panel for panel in choose_panels(columns, limit=24) if panel.kind == "stack"), None)
    if panel is not None:
        heights = {name: [0.0 if math.isnan(mean) else mean for mean in means[name]] for name in panel.metrics}
        series = [
            Series(label=name.removeprefix("timing_s/"), steps=range(len(tables)), values=values)
            for name, values in heights.items()
        ]
        chart = figure(panel, series, stack_chart(series, title=panel.title, names=list(tables)))
    rows = []
    for name, values in means.items():
        _, *above, phase = name.split("/")
        rows.append(("\u2003" * len(above) + phase, ["" if math.isnan(mean) else f"{mean:.3f}" for mean in values]))
    return f"{chart}<p></p>" + number_table(("mean s a step", *tables), rows)


def _metrics(tables: Mapping[str, MetricsTable]) -> str:
    rows = []
    for name in columns_of(tables.values()):
        means = [tail_mean(table.series(name)[1]) for table in tables.values()]
        rows.append((name, ["" if math.isnan(mean) else f"{mean:.5g}" for mean in means]))
    return METRIC_FILTER + number_table(("mean of the last five steps", *tables), rows, "metric-rows")


def _differences(config_texts: Mapping[str, str]) -> str:
    rows = list(differing({label: _parsed(text, label) for label, text in config_texts.items()}).items())
    return number_table(("key", *config_texts), rows) if rows else '<p class="soft">Nothing but their names.</p>'


def _parsed(text: str, label: str) -> Any:
    try:
        return parse_typed(text, None)
    except YamlError as error:
        raise ReportError(f"config.yaml of {label}: {error}") from None
