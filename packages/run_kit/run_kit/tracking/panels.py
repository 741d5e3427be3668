"""Groups of metrics (panels) drawn by curves.png and the report. Pure."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .metrics_table import MetricsTable, columns_of

Section = Literal["curves", "time", "memory", "mismatch"]
"""Sections of the report that have curves."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One small plot: a title, the unit of its axis, its metrics, the section of the report that shows it."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    kind: Literal["line", "stack"] = "line"
    section: Section = "curves"


_PREFERENCES = ("reward", "dpo", "ipo", "kto")
_SUPERVISED = ("sft", *_PREFERENCES)
_LOSSES = ("actor/loss", *(f"{name}/loss" for name in _SUPERVISED))
_SUPERVISED_NORMS = tuple(f"{name}/grad_norm" for name in _SUPERVISED)
# The panels in their order, with patterns (as in file names) for the metrics that they show.
_KNOWN = (
    Panel(title="Score", unit="", metrics=("critic/score/mean", "critic/rewards/mean")),
    Panel(title="Rewards", unit="", metrics=("reward/*/mean",)),
    Panel(title="Held-out", unit="", metrics=("val/*accuracy*", "val/*score*")),
    Panel(title="Loss", unit="", metrics=(*_LOSSES, "val/loss", "critic/vf_loss", "critic/loss")),
    Panel(title="Margin", unit="", metrics=(*(f"{name}/margin" for name in _PREFERENCES), "val/margin")),
    Panel(
        title="Implicit rewards",
        unit="",
        metrics=tuple(f"{name}/{side}_reward" for name in _PREFERENCES for side in ("chosen", "rejected")),
    ),
    Panel(title="Gradient norm", unit="", metrics=("actor/grad_norm", "critic/grad_norm", *_SUPERVISED_NORMS)),
    Panel(title="Critic", unit="", metrics=("critic/explained_variance", "critic/values/mean", "critic/returns/mean")),
    Panel(title="Throughput", unit="tokens/s per device", metrics=("perf/throughput",)),
    Panel(title="Step time", unit="s", metrics=("timing_s/*",), kind="stack", section="time"),
    Panel(title="Waiting", unit="s", metrics=("rollout/trainer_wait_s", "rollout/servers_wait_s"), section="time"),
    Panel(title="Staleness", unit="versions", metrics=("staleness/mean", "staleness/max"), section="mismatch"),
    Panel(
        title="Rollout to trainer log-prob gap",
        unit="nats",
        metrics=("rollout/log_prob_mismatch", "rollout/log_prob_mismatch*", "rollout/mismatch_kl*"),
        section="mismatch",
    ),
    Panel(
        title="Response length",
        unit="tokens",
        metrics=("response_length/mean", "response_length/max", "response_length/min"),
    ),
    Panel(
        title="Memory",
        unit="GiB",
        metrics=("memory/host_peak_gib", "perf/max_memory_reserved_gb", "memory/*_gib", "perf/*memory*_gb"),
        section="memory",
    ),
    Panel(title="Entropy", unit="nats", metrics=("actor/entropy*",)),
    Panel(title="KL", unit="nats", metrics=("actor/*kl*", "critic/*kl*")),
    Panel(title="Clipped share", unit="", metrics=("actor/*clip*", "response_length/clip_ratio")),
    Panel(
        title="Trainer to rollout probability ratio",
        unit="",
        metrics=tuple(f"rollout/mismatch_ratio_{name}" for name in ("p1", "p50", "p99", "mean")),
        section="mismatch",
    ),
    Panel(
        title="Effective sample size",
        unit="",
        metrics=(
            "rollout/mismatch_ess",
            "rollout/mismatch_seq_ess",
            "rollout/mismatch_ess_stale",
            "rollout/correction_ess",
        ),
        section="mismatch",
    ),
    Panel(
        title="Off-policy correction",
        unit="",
        metrics=("rollout/correction_weight_mean", "rollout/correction_outside_share"),
        section="mismatch",
    ),
)
_GPU_MEMORY = "perf/max_memory_*_gb"
_MAX_METRICS = {"Step time": 12, "Memory": 5, "Entropy": 1, "KL": 3, "Clipped share": 3}
"""Number of metrics that a panel shows at most; 4 in the others."""


def is_measured(name: str, values: Sequence[float]) -> bool:
    """Whether a metric with these values is shown: it has some, and they are not the 0 of GPU memory on a CPU."""
    return any(values) if fnmatch.fnmatchcase(name, _GPU_MEMORY) else len(values) > 0


def measured_columns(tables: Sequence[MetricsTable]) -> list[str]:
    """Names of the metrics that any of these runs measured, in the order of their first appearance."""
    return [
        name
        for name in columns_of(tables)
        if is_measured(name, [value for table in tables for value in table.series(name)[1]])
    ]


def choose_panels(columns: Sequence[str], *, limit: int = 12) -> list[Panel]:
    """Panels for a run with these metrics, main ones first; one panel per metric if none of them is known."""
    panels: list[Panel] = []
    for known in _KNOWN:
        names = _stack_parts(columns) if known.kind == "stack" else _matching(columns, known.metrics)
        if names:
            shown = tuple(names[: _MAX_METRICS.get(known.title, 4)])
            panels.append(replace(known, metrics=shown, unit=_unit(known, shown)))
    if not panels:
        panels = [Panel(title=name, unit="", metrics=(name,)) for name in columns]
    return panels[:limit]


def single_panels(columns: Sequence[str], *, each: int | None = None) -> list[Panel]:
    """One panel per metric, for comparing runs; step times give a single panel (the whole step).

    Args:
        each: at most so many of a panel's metrics; None takes all.
    """
    found = []
    for panel in choose_panels(columns):
        for name in ("timing_s/step",) if panel.kind == "stack" else panel.metrics[:each]:
            section: Section = "curves" if panel.kind == "stack" else panel.section  # a whole step is a curve
            found.append(Panel(title=name, unit=_unit(panel, (name,)), metrics=(name,), section=section))
    return found


def _unit(panel: Panel, names: Sequence[str]) -> str:
    """GPUs count their memory in GB, hosts in GiB; every other unit is the panel's."""
    ends = {"GB": any(name.endswith("_gb") for name in names), "GiB": any(name.endswith("_gib") for name in names)}
    found = [unit for unit, is_used in ends.items() if is_used]
    return "GiB (host), GB (GPU)" if len(found) == 2 else found[0] if found else panel.unit


def _matching(columns: Sequence[str], patterns: Sequence[str]) -> list[str]:
    found = [name for pattern in patterns for name in columns if fnmatch.fnmatchcase(name, pattern)]
    return list(dict.fromkeys(found))


def _stack_parts(columns: Sequence[str]) -> list[str]:
    """The top phases of a step, which add up to it; `other` last."""
    parts = [name for name in columns if name.startswith("timing_s/") and name.count("/") == 1]
    parts = [name for name in parts if name not in ("timing_s/step", "timing_s/other")]
    return parts + (["timing_s/other"] if parts and "timing_s/other" in columns else [])
