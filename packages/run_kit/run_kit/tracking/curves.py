"""`curves.png`: the main metrics of a run, or of several, in one picture."""

import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .metrics_table import MetricsTable, atomic_write
from .panels import Panel, choose_panels, measured_columns, single_panels
from .summary import smooth

# Okabe and Ito's palette, which color-blind readers can tell apart, and four of Tol's colors for runs with many phases.
COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#b8a000"),
    *("#332288", "#882255", "#44aa99", "#999933"),
)
_NUM_COLUMNS = 3


def write_curves(table: MetricsTable, path: Path, *, title: str = "") -> Path | None:
    """Draw the main metrics of a table as a grid of small plots and replace `path` by the picture.

    Returns None, and writes nothing, for a table without finite values. Uses matplotlib without its global state, so
    it can run in any thread.
    """
    panels = choose_panels(measured_columns([table]))
    draw = {"line": _draw_lines, "stack": _draw_stack}
    return _write_grid(panels, path, title, lambda axes, panel: draw[panel.kind](axes, table, panel))


def write_compared_curves(tables: Mapping[str, MetricsTable], path: Path, *, title: str = "") -> Path | None:
    """Draw the main metrics of several runs, given by name: one plot per metric, one line per run."""
    columns = measured_columns(list(tables.values()))
    main = {panel.title for panel in single_panels(columns, each=1)} | {"perf/max_memory_reserved_gb"}
    panels = [panel for panel in single_panels(columns) if panel.title in main]
    return _write_grid(
        panels, path, title, lambda axes, panel: _draw_runs(axes, tables, panel, legend=panel is panels[0])
    )


def _write_grid(panels: Sequence[Panel], path: Path, title: str, draw: Callable[[Any, Panel], None]) -> Path | None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not panels:
        return None
    num_columns = min(_NUM_COLUMNS, len(panels))
    num_rows = -(-len(panels) // num_columns)
    width, height = 4.6 * num_columns, 2.75 * num_rows + 0.4
    figure = Figure(figsize=(width, height), dpi=110)
    # Margins in inches: a layout that measures every label takes as long as drawing, and the run waits at its end.
    figure.subplots_adjust(
        left=0.8 / width, right=1 - 0.15 / width, bottom=0.5 / height, top=1 - 0.65 / height, wspace=0.32, hspace=0.42
    )
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    grid = figure.subplots(num_rows, num_columns, squeeze=False)
    for index, axes in enumerate(grid.flat):
        if index < len(panels):
            _frame_panel(axes, panels[index])
            draw(axes, panels[index])
            axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5), useOffset=False)
            axes.yaxis.get_offset_text().set_fontsize(7)
            axes.margins(x=0.02)
        else:
            axes.set_visible(False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    atomic_write(path, picture.getvalue())
    return path


def label_of(panel: Panel, name: str) -> str:
    """Short name of a metric within its panel: what the panel's other metrics do not share with it."""
    parts = name.split("/")
    shared = 0
    others = [other.split("/") for other in panel.metrics if other != name]
    while others and shared < len(parts) - 1 and all(o[: shared + 1] == parts[: shared + 1] for o in others):
        shared += 1
    return "/".join(parts[shared:]) if others else name


def _frame_panel(axes: Any, panel: Panel) -> None:
    axes.set_title(panel.title, fontsize=9.5, loc="left", fontweight="bold")
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(panel.unit, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(True, linewidth=0.4, alpha=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _draw_runs(axes: Any, tables: Mapping[str, MetricsTable], panel: Panel, *, legend: bool) -> None:
    for (label, table), color in zip(tables.items(), itertools.cycle(COLORS), strict=False):
        steps, values = table.series(panel.metrics[0], gaps=True)
        marker = "o" if len(values) <= 10 else None
        axes.plot(steps, values, color=color, linewidth=1.4, marker=marker, markersize=3.5, label=label)
    if legend:
        axes.legend(fontsize=6.5, frameon=False, loc="best")


def _draw_lines(axes: Any, table: MetricsTable, panel: Panel) -> None:
    drawn = 0
    for name, color in zip(panel.metrics, COLORS, strict=False):
        steps, values = table.series(name, gaps=True)
        if not steps:
            continue
        drawn += 1
        noisy = len(values) >= 10 and len(panel.metrics) == 1
        few = len(values) <= 10
        axes.plot(
            steps,
            values,
            color=color,
            linewidth=1.0 if noisy else 1.6,
            alpha=0.4 if noisy else 1.0,
            marker="o" if few else None,
            markersize=3.5,
            label=label_of(panel, name),
        )
        if noisy:
            axes.plot(steps, smooth(values), color=color, linewidth=1.8)
    if len(panel.metrics) > 1:
        axes.legend(fontsize=7, frameon=False, loc="best", ncols=1 if drawn < 4 else 2)
    else:
        axes.set_title(panel.metrics[0], fontsize=7.5, loc="right", color="#666666")


def _draw_stack(axes: Any, table: MetricsTable, panel: Panel) -> None:
    steps, heights = table.aligned(panel.metrics)
    labels = [label_of(panel, name) for name in panel.metrics]
    if len(steps) <= 3:
        bottoms = [0.0] * len(steps)
        for values, color, label in zip(heights, COLORS, labels, strict=False):
            axes.bar(steps, values, bottom=bottoms, color=color, label=label, width=0.6)
            bottoms = [b + v for b, v in zip(bottoms, values, strict=True)]
    else:
        axes.stackplot(steps, heights, labels=labels, colors=COLORS[: len(labels)], alpha=0.85, step="mid")
    axes.set_ylim(bottom=0, top=1.45 * max(1e-9, *(sum(column) for column in zip(*heights, strict=True))))
    axes.legend(fontsize=7, frameon=False, loc="upper left", ncols=3, handlelength=1.0, columnspacing=1.0)
