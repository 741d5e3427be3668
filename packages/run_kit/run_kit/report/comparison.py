"""Comparison page: metrics of several runs overlaid, and the config keys in which they differ."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from ..errors import ReportError
from ..tracking.metrics_table import MetricsTable, atomic_write
from ..tracking.panels import choose_panels, single_panels
from ..tracking.summary import tail_mean
from .data import MAX_ROLLOUTS, RunData, read_run, spread
from .page import METRIC_FILTER, assemble, figure, phase_order, rollouts_section
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
_FIXED_KEYS = ("trainer.experiment", "trainer.output_dir")


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
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, render_comparison(data, title=title))
    return path


def render_comparison(runs: Mapping[str, RunData], *, title: str) -> str:
    """The page as HTML text."""
    tables = {label: run.table for label, run in runs.items()}
    each = MAX_ROLLOUTS // len(runs)
    records: list[dict[str, Any]] = [
        {**record, "run": label} for label, run in runs.items() for record in spread(run.rollouts, each)
    ]
    records.sort(key=lambda record: record["step"])
    sections = [
        ("overview", "Overview", _overview(tables)),
        ("config", "What the runs do not share", _differences({k: run.config_text for k, run in runs.items()})),
        ("curves", "Curves", _figures(tables, "curves")),
        ("time", "Where the time goes", _time(tables)),
        ("memory", "Memory", _figures(tables, "memory")),
        ("mismatch", "Rollout and trainer", _figures(tables, "mismatch")),
        ("rollouts", "Rollouts", rollouts_section(records, sum(run.num_rollouts for run in runs.values()))),
        ("metrics", "All metrics", _metrics(tables)),
    ]
    return assemble(title, f'<p class="soft">{len(runs)} runs</p>', sections, records)


def _figures(tables: Mapping[str, MetricsTable], section: str) -> str:
    columns = list(dict.fromkeys(name for table in tables.values() for name in table.columns))
    figures = []
    for panel in single_panels(columns):
        (name,) = panel.metrics
        if _section_of(name) != section:
            continue
        series = [
            Series(label=label, steps=steps, values=values)
            for label, table in tables.items()
            for steps, values in [table.series(name)]
        ]
        if chart := line_chart(series, title=name):
            figures.append(figure(panel, series, chart))
    return f'<div class="grid3">{"".join(figures)}</div>' if figures else ""


def _section_of(metric: str) -> str:
    if "memory" in metric:
        return "memory"
    return "mismatch" if "mismatch" in metric else "curves"


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
    return _table(("run", "steps", *(words for _, words, _ in known)), rows)


def _time(tables: Mapping[str, MetricsTable]) -> str:
    """Mean seconds per step: one bar per run, and a table of phases with one column per run."""
    columns = list(dict.fromkeys(name for table in tables.values() for name in table.columns))
    means = {label: {name: _mean(table.series(name)[1]) for name in columns} for label, table in tables.items()}
    rows = []
    for name in phase_order([n for n in columns if n.startswith("timing_s/")]):
        path = name.removeprefix("timing_s/")
        cells = ["" if math.isnan(means[label][name]) else f"{means[label][name]:.3f}" for label in tables]
        rows.append(("\u2003" * path.count("/") + path.rpartition("/")[2], cells))
    if not rows:
        return ""
    chart = ""
    for panel in choose_panels(columns, limit=24):
        if panel.kind == "stack":
            series = [
                Series(
                    label=name.removeprefix("timing_s/"),
                    steps=range(len(tables)),
                    values=[0.0 if math.isnan(found[name]) else found[name] for found in means.values()],
                )
                for name in panel.metrics
            ]
            chart = figure(panel, series, stack_chart(series, title=panel.title, names=list(tables)))
    return f"{chart}<p></p>" + _table(("mean s a step", *tables), rows)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _metrics(tables: Mapping[str, MetricsTable]) -> str:
    columns = list(dict.fromkeys(name for table in tables.values() for name in table.columns))
    rows = []
    for name in columns:
        means = [tail_mean(table.series(name)[1]) for table in tables.values()]
        rows.append((name, ["" if math.isnan(mean) else f"{mean:.5g}" for mean in means]))
    return METRIC_FILTER + _table(("mean of the last five steps", *tables), rows, body_id="metric-rows")


def _differences(config_texts: Mapping[str, str]) -> str:
    flat = {label: _flat(yaml.safe_load(text) or {}) for label, text in config_texts.items()}
    keys = [key for key in dict.fromkeys(key for one in flat.values() for key in one) if key not in _FIXED_KEYS]
    rows = []
    for key in keys:
        values = [one.get(key, "") for one in flat.values()]
        if len(set(values)) > 1:
            rows.append((key, values))
    return _table(("key", *config_texts), rows) if rows else '<p class="soft">Nothing but their names.</p>'


def _flat(tree: Any, prefix: str = "") -> dict[str, str]:
    """Dotted key -> value as text."""
    if not isinstance(tree, dict):
        return {prefix: str(tree)}
    return {
        path: value
        for key, inner in tree.items()
        for path, value in _flat(inner, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def _table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], *, body_id: str = "") -> str:
    titles = "".join(f"<th{' class=num' if i else ''}>{escape(text)}</th>" for i, text in enumerate(head))
    lines = "".join(
        f'<tr data-name="{escape(name.lower(), quote=True)}"><td>{escape(name)}</td>'
        + "".join(f'<td class="num">{escape(cell)}</td>' for cell in cells)
        + "</tr>"
        for name, cells in rows
    )
    mark = f' id="{body_id}"' if body_id else ""
    return f'<div class="wide"><table><thead><tr>{titles}</tr></thead><tbody{mark}>{lines}</tbody></table></div>'
