"""Curves: `curves.png` of a run, and the SVG figures of reports. Drawn by matplotlib."""

import io
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from .metrics_table import MetricsTable, atomic_write
from .panels import Panel, choose_panels, measured_columns
from .summary import smooth, tail_mean

# Okabe and Ito's palette, which color-blind readers can tell apart, and four of Tol's colors for runs with many phases.
COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#b8a000"),
    *("#332288", "#882255", "#44aa99", "#999933"),
)
MAX_POINTS = 300
"""Points of a line in the report; longer lines are means over neighboring steps."""
_NUM_COLUMNS = 3
_FEW = 10
"""A line of at most this many points shows each of them; a single longer line is drawn raw and smoothed."""
_TEXT_COLOR, _GRID_COLOR = "#667085", "#e2e6ec"


@dataclass(frozen=True)
class Line:
    """One line or layer: a label, its steps ascending, a value each; nan is a gap."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]


def lines_of(table: MetricsTable, panel: Panel) -> list[Line]:
    """The metrics of a panel that the table has."""
    lines = [Line(label_of(panel, name), *table.series(name, gaps=True)) for name in panel.metrics]
    return [line for line in lines if line.steps]


def write_curves(table: MetricsTable, path: Path, *, title: str = "") -> Path | None:
    """Draw the main metrics of a table as a grid of small plots and replace `path` by the picture.

    Returns None, and writes nothing, for a table without finite values.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = choose_panels(measured_columns([table]))
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
    for axes, panel in itertools.zip_longest(grid.flat, panels):
        if panel is None:
            axes.set_visible(False)
        else:
            _draw_panel(axes, table, panel)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    atomic_write(path, picture.getvalue())
    return path


def _draw_panel(axes: Any, table: MetricsTable, panel: Panel) -> None:
    axes.set_title(panel.title, fontsize=9.5, loc="left", fontweight="bold")
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(panel.unit, fontsize=8)
    _frame(axes)
    if panel.kind == "stack":
        draw_stack(axes, table, panel)
    else:
        draw_lines(axes, lines_of(table, panel))
        if len(panel.metrics) == 1:
            axes.set_title(panel.metrics[0], fontsize=7.5, loc="right", color="#666666")
    _finish(axes)


def lines_of_runs(tables: Mapping[str, MetricsTable], panel: Panel) -> list[Line]:
    """The panel's only metric, one line per run; a run without it has an empty line and keeps its color."""
    return [Line(label, *table.series(panel.metrics[0], gaps=True)) for label, table in tables.items()]


def import_matplotlib() -> None:
    """Import what the functions of this module need."""
    with suppress(Exception):  # they meet it again
        import matplotlib.backends.backend_agg
        import matplotlib.backends.backend_svg
        import matplotlib.figure  # noqa: F401


def to_svg(draw: Callable[[Any], None], *, title: str, size: tuple[float, float] = (4.0, 2.2)) -> str:
    """An `<svg>` element for a page: transparent, with text as text. Not for threads: it changes matplotlib's settings.

    Args:
        draw: draws into matplotlib axes.
        title: accessible name.
        size: width and height in inches, of 72 units each.
    """
    import matplotlib
    from matplotlib.figure import Figure

    text, grid = _TEXT_COLOR, _GRID_COLOR
    colors = {"text.color": text, "axes.edgecolor": grid, "xtick.color": text, "ytick.color": text, "grid.color": grid}
    out = io.StringIO()
    with matplotlib.rc_context({**colors, "svg.fonttype": "none", "axes.facecolor": "none"}):
        width, height = size
        figure = Figure(figsize=size, facecolor="none")
        figure.subplots_adjust(left=0.65 / width, right=1 - 0.08 / width, bottom=0.25 / height, top=1 - 0.16 / height)
        axes = figure.subplots()
        _frame(axes)
        draw(axes)
        _finish(axes)
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=nothing)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{escape(title, quote=True)}" ', 1)
    # A page has other pictures with the same names, and its own fonts; a style element would act on all of it.
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"|<defs>\s*<style.*?</style>\s*</defs>', "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    return re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)


def line_svg(lines: Sequence[Line], *, title: str) -> str:
    """Lines over steps as an `<svg>` element; empty without a finite value."""
    if not any(line.steps for line in lines):
        return ""
    return to_svg(lambda axes: draw_lines(axes, [thin(line) for line in lines]), title=title)


def thin(line: Line, limit: int = MAX_POINTS) -> Line:
    """A line of at most `limit` points: means over neighboring steps."""
    if len(line.steps) <= limit:
        return line
    bounds = [index * len(line.steps) // limit for index in range(limit + 1)]
    pieces = [slice(first, last) for first, last in itertools.pairwise(bounds)]
    values = [tail_mean(line.values[piece], len(line.values)) for piece in pieces]
    return Line(line.label, [line.steps[piece][-1] for piece in pieces], values)


def label_of(panel: Panel, name: str) -> str:
    """Short name of a metric within its panel: what the panel's other metrics do not share with it."""
    parts = name.split("/")
    shared = 0
    others = [other.split("/") for other in panel.metrics if other != name]
    while others and shared < len(parts) - 1 and all(o[: shared + 1] == parts[: shared + 1] for o in others):
        shared += 1
    return "/".join(parts[shared:]) if others else name


def _frame(axes: Any) -> None:
    """A grid and whole steps."""
    axes.grid(True, linewidth=0.6)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _finish(axes: Any) -> None:
    """Settings that depend on what was drawn."""
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5), useOffset=False)
    axes.yaxis.get_offset_text().set_fontsize(7)
    axes.margins(x=0.02)


def draw_lines(axes: Any, lines: Sequence[Line]) -> None:
    """Draws lines in the order of the palette; a single long line is drawn raw and smoothed."""
    for line, color in zip(lines, itertools.cycle(COLORS), strict=False):
        if not line.steps:
            continue
        is_few = len(line.values) <= _FEW
        is_noisy = len(lines) == 1 and not is_few
        style = {"linewidth": 1.0, "alpha": 0.4} if is_noisy else {"linewidth": 1.6}
        marker = "o" if is_few else None
        axes.plot(line.steps, line.values, color=color, label=line.label, marker=marker, markersize=3.5, **style)
        if is_noisy:
            axes.plot(line.steps, smooth(list(line.values)), color=color, linewidth=1.8)
    if len(lines) > 1:
        axes.legend(fontsize=7.5, frameon=False, loc="best", ncols=1 if len(lines) < 4 else 2)


def draw_stack(axes: Any, table: MetricsTable, panel: Panel) -> None:
    """Draws the metrics of a panel on top of each other: bars for up to three steps, else areas."""
    steps, heights = table.aligned(panel.metrics)
    labels = [label_of(panel, name) for name in panel.metrics]
    if len(steps) <= 3:
        bottoms = [0.0] * len(steps)
        for values, color, label in zip(heights, COLORS, labels, strict=False):
            axes.bar(steps, values, bottom=bottoms, color=color, label=label, width=0.6)
            bottoms = [below + value for below, value in zip(bottoms, values, strict=True)]
        axes.set_xticks(steps, steps)
    else:
        axes.stackplot(steps, heights, labels=labels, colors=COLORS[: len(labels)], alpha=0.85, step="mid")
    highest = max((math.fsum(column) for column in zip(*heights, strict=True)), default=0.0)
    axes.set_ylim(bottom=0, top=1.45 * max(1e-9, highest))
    axes.legend(fontsize=7.5, frameon=False, loc="upper left", ncols=3, handlelength=1.0, columnspacing=1.0)
