"""Small charts as SVG text. Pure: numbers in, text out."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise

from ..tracking.summary import smooth, tail_mean

MAX_POINTS = 300
NUM_COLORS = 12
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 14.0, 8.0, 24.0
_DIGIT = 6.6  # width of a digit of a tick's label


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line or layer: a label, its steps ascending, a value each; nan is a gap in a line. One value is finite."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]


class _Scale:
    """Maps steps and values to points of the picture."""

    def __init__(self, shown: Sequence[Series], ticks: Sequence[float], width: float, height: float) -> None:
        self.width, self.height = width, height
        self.first, self.last = min(one.steps[0] for one in shown), max(one.steps[-1] for one in shown)
        self.low, self.high = ticks[0], ticks[-1]
        self.left = max(_LEFT, 10 + _DIGIT * max(map(len, tick_texts(ticks))))

    def x(self, step: float) -> float:
        span = (self.last - self.first) or 1.0
        inner = self.width - self.left - _RIGHT
        middle = inner / 2 if self.last == self.first else 0.0
        return self.left + middle + inner * (step - self.first) / span

    def y(self, value: float) -> float:
        inner = self.height - _TOP - _BOTTOM
        return _TOP + inner * (1 - (value - self.low) / (self.high - self.low))


def color(index: int) -> str:
    """CSS class of a series' color; colors repeat after the twelfth."""
    return f"c{index % NUM_COLORS}"


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values that cover low..high, about `count` of them, at steps of 1, 2, 2.5 or 5 times a power of ten."""
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"low and high must be finite, got {low} and {high}")
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def tick_text(value: float) -> str:
    """A short number: `0.25`, `1.5k`, `2e-05`."""
    size = abs(value)
    if size < 1e-12:
        return "0"
    if size >= 1e9 or size < 1e-3:
        return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.2g}")
    for limit, unit in ((1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e6 if unit == 'M' else 1e3):.3g}{unit}"
    return f"{value:.4g}"


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Short numbers, with more digits where they would otherwise be equal."""
    texts = [tick_text(tick) for tick in ticks]
    for digits in (7, 10, 15):
        if len(set(texts)) == len(texts):
            break
        texts = [f"{tick:.{digits}g}" for tick in ticks]
    return texts


def thin(series: Series, limit: int = MAX_POINTS) -> Series:
    """A series of at most `limit` points: means over neighboring steps."""
    if len(series.steps) <= limit:
        return series
    bounds = [index * len(series.steps) // limit for index in range(limit + 1)]
    pieces = [slice(a, b) for a, b in pairwise(bounds)]
    values = [tail_mean(values, len(values)) for values in (series.values[piece] for piece in pieces)]
    return Series(label=series.label, steps=[series.steps[piece][-1] for piece in pieces], values=values)


def line_chart(series: Sequence[Series], *, title: str, width: float = 360.0, height: float = 190.0) -> str:
    """Lines over steps; every point has its value as a tooltip."""
    shown = [thin(one) for one in series if one.steps]
    if not shown:
        return ""
    values = [value for one in shown for value in one.values if math.isfinite(value)]
    ticks = nice_ticks(min(values), max(values))
    scale = _Scale(shown, ticks, width, height)
    parts = [_frame(scale, ticks, [(scale.x(step), str(step)) for step in _step_ticks(scale.first, scale.last)])]
    for index, one in enumerate(thin(one) for one in series):  # an empty series keeps its color
        if not one.steps:
            continue
        points = [(scale.x(step), scale.y(value)) for step, value in zip(one.steps, one.values, strict=True)]
        noisy = len(shown) == 1 and len(points) >= 10
        parts.append(_polylines(points, f"line {color(index)}{' raw' if noisy else ''}"))
        if noisy:
            smoothed = [(x, scale.y(value)) for (x, _), value in zip(points, smooth(list(one.values)), strict=True)]
            parts.append(_polylines(smoothed, f"line {color(index)}"))
        small = " few" if len(points) <= 20 else ""
        for (x, y), step, value in zip(points, one.steps, one.values, strict=True):
            if math.isnan(value):
                continue
            tip = escape(f"{one.label}, step {step}: {value:.6g}")
            place = f'class="dot {color(index)}{small}" cx="{x:.1f}" cy="{y:.1f}" r="4"'
            parts.append(f"<circle {place}><title>{tip}</title></circle>")
    return _svg(parts, title, width, height)


def stack_chart(
    series: Sequence[Series], *, title: str, names: Sequence[str] = (), width: float = 1120.0, height: float = 260.0
) -> str:
    """Stacked bars over steps, one layer per series; all series have the same steps.

    Args:
        names: labels of the bars where they are not steps, one each.
    """
    shown = [thin(one, 120) for one in series if one.steps]
    if not shown:
        return ""
    steps = shown[0].steps
    totals = [sum(one.values[i] for one in shown) for i in range(len(steps))]
    ticks = nice_ticks(0.0, max(totals))
    scale = _Scale(shown, ticks, width, height)
    slot = (width - scale.left - _RIGHT) / len(steps)
    middles = [scale.left + (i + 0.5) * slot for i in range(len(steps))]
    bar = min(40.0, 0.86 * slot)
    labelled = set(_step_ticks(steps[0], steps[-1]))
    under = list(names) or [str(step) if step in labelled else "" for step in steps]
    bars = names or [f"step {step}" for step in steps]
    parts = [_frame(scale, ticks, [(x, text) for x, text in zip(middles, under, strict=True) if text])]
    base = [0.0] * len(steps)
    for index, one in enumerate(shown):
        for i, value in enumerate(one.values):
            top, bottom = scale.y(base[i] + value), scale.y(base[i])
            x = middles[i] - bar / 2
            tip = escape(f"{one.label}, {bars[i]}: {value:.4g} s of {totals[i]:.4g} s")
            parts.append(
                f'<rect class="bar {color(index)}" x="{x:.1f}" y="{top:.1f}" width="{bar:.1f}" '
                f'height="{max(0.0, bottom - top):.1f}"><title>{tip}</title></rect>'
            )
            base[i] += value
    return _svg(parts, title, width, height)


def _polylines(points: Sequence[tuple[float, float]], kind: str) -> str:
    """One line for each run of points whose values are numbers."""
    runs = [list(run) for known, run in groupby(points, lambda point: not math.isnan(point[1])) if known]
    paths = [" ".join(f"{x:.1f},{y:.1f}" for x, y in run) for run in runs]
    return "".join(f'<polyline class="{kind}" points="{path}"/>' for path in paths)


def _frame(scale: _Scale, ticks: Sequence[float], below: Sequence[tuple[float, str]]) -> str:
    right, bottom = scale.width - _RIGHT, scale.height - _BOTTOM
    parts = []
    for tick, text in zip(ticks, tick_texts(ticks), strict=True):
        y = scale.y(tick)
        parts.append(f'<line class="grid" x1="{scale.left:.1f}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{scale.left - 5:.1f}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
    for x, text in below:
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 15:.1f}" text-anchor="middle">{escape(text)}</text>')
    return "".join(parts)


def _step_ticks(first: float, last: float) -> list[int]:
    if last == first:
        return [int(first)]
    ticks = nice_ticks(first, last, 6)
    return sorted({int(tick) for tick in ticks if first <= tick <= last and float(tick).is_integer()}) or [int(first)]


def _svg(parts: Sequence[str], title: str, width: float, height: float) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title, quote=True)}">'
        f"{''.join(parts)}</svg>"
    )
