"""Reports of training runs: one page about a run, or one that compares several."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..config.differences import config_differences
from ..errors import TrackingError
from ..tracking.curves import Line, draw_stack, line_svg, lines_of, lines_of_runs, to_svg
from ..tracking.metrics_table import MetricsTable, atomic_write, columns_of
from ..tracking.panels import Panel, choose_panels, measured_columns, single_panels
from ..tracking.summary import overview, summarize, tail_mean
from .data import MAX_ROLLOUTS, RunData, read_run, spread
from .page import Figure, Section, Table, render


def write_report(run_folder: Path | str, path: Path | str | None = None) -> Path:
    """Write the page of a run folder and return its path: `report.html` in the folder when none is given.

    The page needs no server and no other file. It shows curves, step time by phase, memory, the mismatch between
    rollout and trainer log-probs, sample rollouts (searchable), every metric, the configuration and the end of the log.

    Raises:
        TrackingError: a missing folder, no metrics, or malformed files.
    """
    data = read_run(run_folder)
    texts = {"config.yaml": data.config_text, "End of train.log": data.log_text}
    sections = [
        *_plots({data.name: data}),
        _rollouts(data.rollouts, data.num_rollouts),
        Section(key="metrics", title="All metrics", table=_summaries(data.table, data.table.columns)),
        Section(key="config", title="Configuration and log", folded={key: text for key, text in texts.items() if text}),
    ]
    path = Path(run_folder) / "report.html" if path is None else Path(path)
    atomic_write(path, render(data.name, sections, records=data.rollouts))
    return path


def write_comparison(runs: Mapping[str, Path | str], path: Path | str, *, title: str = "Comparison") -> Path:
    """Write one page about several run folders and return its path.

    Args:
        runs: label -> run folder, in the order of the page.

    Raises:
        TrackingError: fewer than two runs, a missing folder, no metrics, or malformed files.
    """
    if len(runs) < 2:
        raise TrackingError(field="runs", value=list(runs), allowed="two run folders or more")
    data = {label: read_run(folder) for label, folder in runs.items()}
    tables = [run.table for run in data.values()]
    each = MAX_ROLLOUTS // len(data)
    records = [{**record, "run": label} for label, run in data.items() for record in spread(run.rollouts, each)]
    records.sort(key=lambda record: record["step"])
    measures = overview(tables)
    rows = [(label, [measure.texts[index] for measure in measures]) for index, label in enumerate(data)]
    keys = config_differences({label: run.config_text for label, run in data.items()})
    means = [(name, [tail_mean(table.series(name)[1]) for table in tables]) for name in columns_of(tables)]
    metrics = [(name, ["" if math.isnan(mean) else f"{mean:.5g}" for mean in values]) for name, values in means]
    sections = [
        Section(key="overview", title="Overview", table=Table(head=("run", *(m.title for m in measures)), rows=rows)),
        Section(key="config", title="Keys that differ", table=Table(head=("key", *data), rows=list(keys.items()))),
        *_plots(data),
        _rollouts(records, sum(run.num_rollouts for run in data.values())),
        Section(key="metrics", title="All metrics", table=Table(head=("mean, last five", *data), rows=metrics)),
    ]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, render(title, sections, note=f"{len(data)} runs", records=records))
    return path


def _plots(runs: Mapping[str, RunData]) -> Iterator[Section]:
    """The sections with curves: of the panels of one run, or of each metric over several runs."""
    tables = {label: run.table for label, run in runs.items()}
    columns = measured_columns(list(tables.values()))
    alone = next(iter(runs.values())) if len(runs) == 1 else None
    panels = single_panels(columns) if alone is None else choose_panels(columns, limit=24)
    for key, title in (
        ("curves", "Curves"),
        ("time", "Where the time goes"),
        ("memory", "Memory"),
        ("mismatch", "Rollout and trainer"),
    ):
        own = [panel for panel in panels if panel.section == key and panel.kind == "line"]
        figures = [
            _figure(panel, lines_of_runs(tables, panel) if alone is None else lines_of(alone.table, panel))
            for panel in own
        ]
        table = None
        if key == "time":
            figures, table = [*(_step_times(alone.table) if alone else ()), *figures], _time_table(tables)
        elif key != "curves" and alone is not None and own:
            table = _summaries(alone.table, [name for panel in own for name in panel.metrics])
        elif key == "curves" and alone is not None and alone.supervised is not None:
            panel = Panel(title="Warm start loss", unit="nats a token", metrics=("sft/loss",))
            figures.append(_figure(panel, lines_of(alone.supervised, panel)))
        yield Section(key=key, title=title, figures=figures, table=table)


def _figure(panel: Panel, lines: Sequence[Line]) -> Figure:
    return Figure(title=panel.title, unit=panel.unit, svg=line_svg(lines, title=panel.title))


def _step_times(table: MetricsTable) -> Iterator[Figure]:
    """The phases of a step on top of each other, over the steps."""
    for panel in choose_panels(table.columns, limit=24):
        if panel.kind == "stack":
            svg = to_svg(partial(draw_stack, table=table, panel=panel), title=panel.title, size=(10.5, 2.8))
            yield Figure(title=panel.title, unit=panel.unit, svg=svg, wide=True)


def _seconds_a_step(table: MetricsTable, phase: str) -> float:
    """Total of a phase divided by the number of timed steps, also of those without the phase; NaN if it never ran."""
    values = table.series(phase)[1]
    return math.fsum(values) / (len(table.series("timing_s/step")[1]) or len(values)) if values else math.nan


def _time_table(tables: Mapping[str, MetricsTable]) -> Table | None:
    """Mean seconds per step and phase: with totals and shares for one run, with a column per run for several."""
    alone = next(iter(tables.values())) if len(tables) == 1 else None
    total_s = math.fsum(alone.series("timing_s/step")[1]) if alone else 0.0
    rows = []
    for name in phase_order([name for name in columns_of(tables.values()) if name.startswith("timing_s/")]):
        means = [_seconds_a_step(table, name) for table in tables.values()]
        cells = ["" if math.isnan(mean) else f"{mean:.3f}" for mean in means]
        if alone:
            if name == "timing_s/step" or not any(cells):
                continue
            seconds = math.fsum(alone.series(name)[1])
            cells = [f"{seconds:.2f}", *cells, f"{seconds / total_s if total_s else 0.0:.1%}"]
        rows.append(("\u2003" * (name.count("/") - 1) + name.rpartition("/")[2], cells))
    head = ("phase", "total s", "s a step", "of all steps") if alone else ("mean s a step", *tables)
    return Table(head=head, rows=rows) if rows else None


def phase_order(names: Sequence[str], prefix: str = "timing_s/") -> list[str]:
    """Phases in depth-first order, siblings in the order of their first log."""
    tops = [name for name in names if name.startswith(prefix) and "/" not in name[len(prefix) :]]
    return [name for top in tops for name in (top, *phase_order(names, f"{top}/"))]


def _summaries(table: MetricsTable, names: Sequence[str]) -> Table:
    rows = []
    for name in names:
        one = summarize(table.series(name)[1])
        numbers = (one.first_mean, one.last_mean, one.change, one.minimum, one.maximum, one.last)
        rows += [(name, [f"{number:.5g}" for number in numbers])] if one.num_values else []
    return Table(head=("metric", "first five", "last five", "change", "lowest", "highest", "last"), rows=rows)


def _rollouts(records: Sequence[Mapping[str, Any]], num_rollouts: int) -> Section:
    note = f"{len(records)} of {num_rollouts} kept samples, spread over the run." if len(records) < num_rollouts else ""
    return Section(key="rollouts", title="Rollouts", note=note, has_records=bool(records))
