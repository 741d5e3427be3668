"""Comparison page: metrics of several runs overlaid, and the config keys in which they differ."""

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from ..errors import ReportError
from ..tracking.metrics_table import MetricsTable, atomic_write, columns_of
from ..tracking.panels import Section, choose_panels, measured_columns, single_panels
from ..tracking.summary import tail_mean
from .data import MAX_ROLLOUTS, read_run, spread
from .overview import config_differences, overview
from .page import (
    METRIC_FILTER,
    assemble,
    figure,
    figure_grid,
    number_table,
    phase_order,
    rollouts_section,
    seconds_a_step,
)
from .shared_prompts import Record, SharedPrompt, shared_prompts
from .sides import Response, Side, side_by_side
from .svg import Series, line_chart, stack_chart

_MOST_PROMPTS = 50
"""Shared prompts on the page."""
_OPEN_PROMPTS = 6
"""Those that are visible before the user opens the others."""
_MOST_RESPONSES = 3
"""Responses of a run to a shared prompt."""


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
        ("config", "Keys that differ", _differences({label: run.config_text for label, run in data.items()})),
        ("curves", "Curves", _figures(tables, "curves")),
        ("time", "Where the time goes", _time(tables)),
        ("memory", "Memory", _figures(tables, "memory")),
        ("mismatch", "Rollout and trainer", _figures(tables, "mismatch")),
        ("sides", "Same prompts", _sides({label: run.rollouts for label, run in data.items()})),
        ("rollouts", "Rollouts", rollouts_section(records, sum(run.num_rollouts for run in data.values()))),
        ("metrics", "All metrics", _metrics(tables)),
    ]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, assemble(title, f'<p class="soft">{len(data)} runs</p>', sections, records))
    return path


def _figures(tables: Mapping[str, MetricsTable], section: Section) -> str:
    figures = []
    for panel in single_panels(measured_columns(list(tables.values()))):
        (name,) = panel.metrics
        if panel.section == section:
            found = {label: table.series(name, gaps=True) for label, table in tables.items()}
            series = [Series(label=label, steps=steps, values=values) for label, (steps, values) in found.items()]
            chart = line_chart(series, title=name)
            figures.append(figure(panel, series, chart) if chart else "")
    return figure_grid(figures)


def _overview(tables: Mapping[str, MetricsTable]) -> str:
    measures = overview(list(tables.values()))
    rows = [(label, [measure.texts[index] for measure in measures]) for index, label in enumerate(tables)]
    return number_table(("run", *(measure.title for measure in measures)), rows)


def _time(tables: Mapping[str, MetricsTable]) -> str:
    """Mean seconds per step: one bar per run, and a table of phases with one column per run."""
    columns = columns_of(tables.values())
    phases = phase_order([name for name in columns if name.startswith("timing_s/")])
    means = {name: [seconds_a_step(table, name) for table in tables.values()] for name in phases}
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


def _sides(rollouts: Mapping[str, list[dict[str, Any]]]) -> str:
    """Responses of the runs to the same prompts, side by side; empty if they share none."""
    found = shared_prompts(rollouts)
    if not found:
        return ""
    bodies = [_side_by_side(one) for one in found[:_MOST_PROMPTS]]
    first, rest = "".join(bodies[:_OPEN_PROMPTS]), "".join(bodies[_OPEN_PROMPTS:])
    more = f"<details><summary>{len(bodies) - _OPEN_PROMPTS} more</summary>{rest}</details>" if rest else ""
    shown = "" if len(bodies) == len(found) else f", {len(bodies)} of them shown"
    note = "the largest difference in reward first. The responses are of the newest step that the runs share, if any."
    return f'<p class="soft">{len(found)} prompts that two runs or more sampled{shown}; {note}</p>{first}{more}'


def _side_by_side(shared: SharedPrompt) -> str:
    mean = fmean(shared.mean_rewards or [0.0])
    sides = [
        Side(
            title=f"{label}, step {records[0]['step']}",
            responses=[_response(record, mean) for record in records[:_MOST_RESPONSES]],
        )
        for label, records in shared.records.items()
    ]
    truths = [record.get("ground_truth") for records in shared.records.values() for record in records]
    truth = next((f"ground truth {truth}" for truth in truths if truth), "")
    return side_by_side(f"step {shared.step}", truth, shared.prompt, sides)


def _response(record: Record, mean: float) -> Response:
    reward = math.nan if record["reward"] is None else record["reward"]
    color: Literal["up", "down", "soft"] = "up" if reward > mean else "down" if reward < mean else "soft"
    return Response(verdict=f"reward {reward:.4g}", color=color, text=record["response"])


def _metrics(tables: Mapping[str, MetricsTable]) -> str:
    rows = []
    for name in columns_of(tables.values()):
        means = [tail_mean(table.series(name)[1]) for table in tables.values()]
        rows.append((name, ["" if math.isnan(mean) else f"{mean:.5g}" for mean in means]))
    return METRIC_FILTER + number_table(("mean of the last five steps", *tables), rows, "metric-rows")


def _differences(config_texts: Mapping[str, str]) -> str:
    rows = list(config_differences(config_texts).items())
    return number_table(("key", *config_texts), rows) if rows else '<p class="soft">Nothing but their names.</p>'
