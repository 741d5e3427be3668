"""Groups of metrics (panels) drawn by curves.png and the report. Pure."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PanelKind = Literal["line", "stack"]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One small plot: a title, the unit of its axis, its metrics."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    kind: PanelKind = "line"


@dataclass(frozen=True, kw_only=True)
class _Wish:
    """A panel that is drawn when the run has one of its metrics; patterns as in file names."""

    title: str
    unit: str
    patterns: tuple[str, ...]
    kind: PanelKind = "line"
    limit: int = 4


_WISHES = (
    _Wish(title="Score", unit="", patterns=("critic/score/mean", "critic/rewards/mean")),
    _Wish(title="Held-out", unit="", patterns=("val/*accuracy*", "val/*score*")),
    _Wish(title="Loss", unit="", patterns=("actor/loss", "sft/loss", "critic/vf_loss", "critic/loss")),
    _Wish(title="Gradient norm", unit="", patterns=("actor/grad_norm", "critic/grad_norm", "sft/grad_norm")),
    _Wish(title="Critic", unit="", patterns=("critic/explained_variance", "critic/values/mean", "critic/returns/mean")),
    _Wish(title="Throughput", unit="tokens/s per device", patterns=("perf/throughput",)),
    _Wish(title="Step time", unit="s", patterns=("timing_s/*",), kind="stack", limit=12),
    _Wish(
        title="Rollout to trainer log-prob gap",
        unit="nats",
        patterns=("rollout/log_prob_mismatch", "rollout/log_prob_mismatch*", "rollout/*mismatch*"),
    ),
    _Wish(
        title="Response length",
        unit="tokens",
        patterns=("response_length/mean", "response_length/max", "response_length/min"),
    ),
    _Wish(
        title="Memory",
        unit="GiB (host), GB (GPU)",
        patterns=("memory/host_peak_gib", "perf/max_memory_reserved_gb", "memory/*_gib", "perf/*memory*_gb"),
        limit=5,
    ),
    _Wish(title="Entropy", unit="nats", patterns=("actor/entropy*",), limit=1),
    _Wish(title="KL", unit="nats", patterns=("actor/*kl*", "critic/*kl*"), limit=3),
    _Wish(title="Clipped share", unit="", patterns=("actor/*clip*", "response_length/clip_ratio"), limit=3),
)


def choose_panels(columns: Sequence[str], *, limit: int = 12) -> list[Panel]:
    """Panels for a run with these metrics, main ones first; one panel per metric if none of them is known."""
    panels: list[Panel] = []
    for wish in _WISHES:
        names = _stack_parts(columns) if wish.kind == "stack" else _matching(columns, wish.patterns)
        if names:
            panels.append(Panel(title=wish.title, unit=wish.unit, metrics=tuple(names[: wish.limit]), kind=wish.kind))
    if not panels:
        panels = [Panel(title=name, unit="", metrics=(name,)) for name in columns]
    return panels[:limit]


def single_panels(columns: Sequence[str], *, each: int | None = None) -> list[Panel]:
    """One panel per metric, for comparing runs; step times give a single panel (the whole step).

    Args:
        each: at most so many of a panel's metrics; None takes all.
    """
    found = []
    for panel in choose_panels(columns, limit=24):
        for name in ("timing_s/step",) if panel.kind == "stack" else panel.metrics[:each]:
            unit = "GB" if name.endswith("_gb") else panel.unit
            found.append(Panel(title=name, unit=unit, metrics=(name,)))
    return found


def _matching(columns: Sequence[str], patterns: Sequence[str]) -> list[str]:
    found = [name for pattern in patterns for name in columns if fnmatch.fnmatchcase(name, pattern)]
    return list(dict.fromkeys(found))


def _stack_parts(columns: Sequence[str]) -> list[str]:
    """The top phases of a step, which add up to it; `other` last."""
    parts = [name for name in columns if name.startswith("timing_s/") and name.count("/") == 1]
    parts = [name for name in parts if name not in ("timing_s/step", "timing_s/other")]
    return parts + (["timing_s/other"] if parts and "timing_s/other" in columns else [])
