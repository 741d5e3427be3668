"""Report page: combines a run's data, charts, CSS and JavaScript."""

import json
import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..tracking.curves import label_of
from ..tracking.metrics_table import MetricsTable, atomic_write
from ..tracking.panels import Panel, Section, choose_panels, measured_columns
from ..tracking.progress import duration_text
from ..tracking.summary import summarize
from .assets import SCRIPT, STYLE
from .data import RunData, read_run
from .svg import Series, color, line_chart, stack_chart

# The page forbids loading external resources by its own content security policy.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
METRIC_FILTER = '<div class="bar-row"><input type="search" id="metric-query" placeholder="filter metrics"></div>'


def write_report(run_folder: Path | str, path: Path | str | None = None) -> Path:
    """Write the page of a run folder and return its path: `report.html` in the folder when none is given.

    The page needs no server and no other file. It shows curves, step time by phase, memory, the mismatch between
    rollout and trainer log-probs, sample rollouts (searchable), every metric, the configuration and the end of the log.

    Raises:
        ReportError: a missing folder, no metrics, or malformed files.
    """
    folder = Path(run_folder)
    path = folder / "report.html" if path is None else Path(path)
    data = read_run(folder)
    panels = choose_panels(measured_columns([data.table]), limit=24)
    sections = [
        ("curves", "Curves", _curves(data, panels)),
        ("time", "Where the time goes", _time(data.table, panels)),
        ("memory", "Memory", _own_panels(data.table, panels, "memory")),
        ("mismatch", "Rollout and trainer", _own_panels(data.table, panels, "mismatch")),
        ("rollouts", "Rollouts", rollouts_section(data.rollouts, data.num_rollouts)),
        ("metrics", "All metrics", METRIC_FILTER + _summary_table(data.table, data.table.columns, "metric-rows")),
        ("config", "Configuration and log", _texts(data)),
    ]
    atomic_write(path, assemble(data.name, _tiles(data), sections, data.rollouts))
    return path


def assemble(name: str, top: str, sections: Sequence[tuple[str, str, str]], records: Sequence[dict[str, Any]]) -> str:
    """Assemble a page. `sections` are (id, title, HTML), empty ones are left out; `records` are rollouts."""
    present = [(key, title, body) for key, title, body in sections if body]
    links = "".join(f'<a href="#{key}">{escape(title)}</a>' for key, title, _ in present)
    bodies = "".join(f'<section><h2 id="{key}">{escape(title)}</h2>{body}</section>' for key, title, body in present)
    name = escape(name)
    # JSON that cannot close the script element around it.
    data = json.dumps(records, ensure_ascii=False, allow_nan=False, default=str).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><nav><div><b>{name}</b>{links}</div></nav>"
        f"<main><h1>{name}</h1>{top}{bodies}</main>"
        f'<script type="application/json" id="records">{data}</script>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _tiles(data: RunData) -> str:
    table, tiles = data.table, []
    steps = [step for step in table.steps if step > 0]
    wall = data.summary.get("wall_s")
    took = f"in {duration_text(wall)}" if isinstance(wall, (int, float)) else "logged"
    tiles.append(_tile(str(len(steps)), f"steps {took}"))
    before, after = data.summary.get("accuracy_before"), data.summary.get("accuracy_after")
    if isinstance(before, (int, float)) and isinstance(after, (int, float)):
        tiles.append(_change_tile(before, after, "held-out accuracy, before and after"))
    scores = summarize(table.series("critic/score/mean")[1])
    if scores.num_values:
        tiles.append(_change_tile(scores.first_mean, scores.last_mean, "mean score, first and last five steps"))
    for name, words, form in (
        ("perf/throughput", "tokens/s per device, last five steps", "{:,.0f}"),
        ("timing_s/step", "seconds a step, last five steps", "{:.3g}"),
        ("rollout/log_prob_mismatch", "rollout to trainer log-prob gap, last five", "{:.2g}"),
    ):
        found = summarize(table.series(name)[1])
        if found.num_values:
            tiles.append(_tile(form.format(found.last_mean), words))
    peaks = table.series("memory/host_peak_gib")[1]
    if peaks:
        tiles.append(_tile(f"{max(peaks):.2f} GiB", "peak host memory"))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _tile(value: str, words: str) -> str:
    return f'<div class="tile"><b>{value}</b><span>{escape(words)}</span></div>'


def _change_tile(before: float, after: float, words: str) -> str:
    change = after - before
    kind = "up" if change > 0 else "down" if change < 0 else "soft"
    return _tile(f'{before:.3f} &rarr; {after:.3f} <small class="{kind}">{change:+.3f}</small>', words)


def _curves(data: RunData, panels: Sequence[Panel]) -> str:
    figures = [_line_figure(data.table, panel) for panel in panels if panel.section == "curves"]
    if data.supervised is not None:
        panel = Panel(title="Warm start loss", unit="nats a token", metrics=("sft/loss",))
        figures.append(_line_figure(data.supervised, panel))
    return figure_grid(figures)


def _own_panels(table: MetricsTable, panels: Sequence[Panel], section: Section) -> str:
    """The curves of the panels of a section and the summary of their metrics."""
    charts = {panel: _line_figure(table, panel) for panel in panels if panel.section == section}
    names = [name for panel, chart in charts.items() if chart for name in panel.metrics]
    return figure_grid(list(charts.values())) + _summary_table(table, names) if names else ""


def _line_figure(table: MetricsTable, panel: Panel) -> str:
    found = {name: table.series(name, gaps=True) for name in panel.metrics}
    series = [
        Series(label=label_of(panel, name), steps=steps, values=values)
        for name, (steps, values) in found.items()
        if steps
    ]
    chart = line_chart(series, title=panel.title)
    return figure(panel, series, chart) if chart else ""


def figure_grid(figures: Sequence[str]) -> str:
    """Figures in columns; empty if all of them are."""
    body = "".join(figures)
    return f'<div class="grid3">{body}</div>' if body else ""


def figure(panel: Panel, series: Sequence[Series], chart: str) -> str:
    """A chart with its title, unit and legend."""
    legend = "".join(f'<span><i class="{color(i)}"></i>{escape(one.label)}</span> ' for i, one in enumerate(series))
    unit = f'<span class="soft">{escape(panel.unit)}</span>' if panel.unit else ""
    caption = f"<figcaption>{escape(panel.title)}{unit}</figcaption>"
    kind = " class=stack" if panel.kind == "stack" else ""
    return f'<figure{kind}>{caption}<div class="legend">{legend}</div><div class="chart">{chart}</div></figure>'


def _time(table: MetricsTable, panels: Sequence[Panel]) -> str:
    panel = next((panel for panel in panels if panel.kind == "stack"), None)
    if panel is None:
        return ""
    steps, heights = table.aligned(panel.metrics)
    series = [
        Series(label=label_of(panel, name), steps=steps, values=values)
        for name, values in zip(panel.metrics, heights, strict=True)
        if table.series(name)[0]
    ]
    return figure(panel, series, stack_chart(series, title=panel.title)) + _time_table(table)


def seconds_a_step(table: MetricsTable, phase: str) -> float:
    """Total of a phase divided by the number of timed steps, also of those without the phase; NaN if it never ran."""
    values = table.series(phase)[1]
    return math.fsum(values) / (len(table.series("timing_s/step")[1]) or len(values)) if values else math.nan


def _time_table(table: MetricsTable) -> str:
    total_s = math.fsum(table.series("timing_s/step")[1])
    rows = []
    for name in phase_order([n for n in table.columns if n.startswith("timing_s/")]):
        path = name.removeprefix("timing_s/")
        values = table.series(name)[1]
        if path == "step" or not values:
            continue
        seconds = math.fsum(values)
        share = seconds / total_s if total_s > 0 else 0.0
        pad = 10 + 20 * path.count("/")
        rows.append(
            f'<tr><td style="padding-left:{pad}px">{escape(path.rpartition("/")[2])}</td>'
            f'<td class="num">{seconds:.2f}</td><td class="num">{seconds_a_step(table, name):.3f}</td>'
            f'<td class="num">{100 * share:.1f}%</td><td class="share"><div class="track">'
            f'<div class="fill" style="width:{min(100.0, 100 * share):.1f}%"></div></div></td></tr>'
        )
    head = '<th>phase</th><th class="num">total s</th><th class="num">s a step</th><th class="num">of all steps</th>'
    body = f'<thead><tr>{head}<th class="share"></th></tr></thead><tbody>{"".join(rows)}</tbody>'
    return f'<p></p><div class="wide"><table>{body}</table></div>'


def phase_order(names: Sequence[str]) -> list[str]:
    """Phases in depth-first order, siblings in the order of their first log."""
    ordered: list[str] = []

    def visit(prefix: str) -> None:
        for name in names:
            if name.startswith(prefix) and "/" not in name[len(prefix) :]:
                ordered.append(name)
                visit(f"{name}/")

    visit("timing_s/")
    return ordered


def _summary_table(table: MetricsTable, names: Sequence[str], body_id: str = "") -> str:
    rows = []
    for name in names:
        found = summarize(table.series(name)[1])
        if found.num_values:
            cells = (found.first_mean, found.last_mean, found.change, found.minimum, found.maximum, found.last)
            rows.append((name, [f"{value:.5g}" for value in cells]))
    titles = ("metric", "first five", "last five", "change", "lowest", "highest", "last")
    return f"<p></p>{number_table(titles, rows, body_id)}"


def number_table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], body_id: str = "") -> str:
    """A table whose rows are a name and cells aligned to the right; `body_id` lets the page filter the rows."""
    titles = "".join(f"<th{' class=num' if i else ''}>{_breakable(text)}</th>" for i, text in enumerate(head))
    lines = "".join(
        f'<tr data-name="{escape(name.lower(), quote=True)}"><td>{_breakable(name)}</td>'
        + "".join(f'<td class="num">{escape(cell)}</td>' for cell in cells)
        + "</tr>"
        for name, cells in rows
    )
    mark = f' id="{body_id}"' if body_id else ""
    return f'<div class="wide"><table><thead><tr>{titles}</tr></thead><tbody{mark}>{lines}</tbody></table></div>'


def _breakable(name: str) -> str:
    """HTML of a name that a narrow table may break after `/`, `_` and `.`."""
    return re.sub(r"([/_.])(?=\w)", r"\1<wbr>", escape(name))


def rollouts_section(records: Sequence[dict[str, Any]], num_rollouts: int) -> str:
    """The search form and the container of the records."""
    if not records:
        return ""
    shortened = ""
    if len(records) < num_rollouts:
        shortened = f'<p class="soft">{len(records)} of {num_rollouts} kept samples, spread over the run.</p>'
    return (
        f'{shortened}<div class="bar-row"><input type="search" id="query" placeholder="search prompts and responses">'
        '<label>reward <input type="number" id="low" step="any" placeholder="from"> '
        '<input type="number" id="high" step="any" placeholder="to"></label>'
        '<select id="step"><option value="">every step</option></select>'
        '<select id="order"><option value="new">newest first</option><option value="old">oldest first</option>'
        '<option value="best">best first</option><option value="worst">worst first</option></select></div>'
        '<div class="soft" id="count"></div><div id="samples"></div><button id="more" hidden>Show more</button>'
    )


def _texts(data: RunData) -> str:
    parts = []
    for title, text in (("config.yaml", data.config_text), ("End of train.log", data.log_text)):
        if text:
            parts.append(f"<details><summary>{title}</summary><pre>{escape(text)}</pre></details>")
    return "".join(parts)
