"""Panels: the groups of metrics that `curves.png` and the report draw together. Pure."""

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
    limit: int = 4
    """The panel shows at most this many metrics."""


def _panel(title: str, patterns: str, unit: str = "", section: Section = "curves", limit: int = 4) -> Panel:
    return Panel(title=title, unit=unit, metrics=tuple(patterns.split()), section=section, limit=limit)


# Panels in the order of the page, with file-name patterns for the metrics that they show.
_KNOWN = (
    _panel("Score", "critic/score/mean critic/rewards/mean"),
    _panel("Rewards", "reward/*/mean"),
    _panel("Held-out", "val/*accuracy* val/*score*"),
    _panel("Loss", "[!v]*/loss val/loss critic/vf_loss"),
    _panel("Margin", "[!v]*/margin val/margin"),
    _panel("Implicit rewards", "*/chosen_reward */rejected_reward"),
    _panel("Gradient norm", "*/grad_norm"),
    _panel("Critic", "critic/explained_variance critic/values/mean critic/returns/mean"),
    _panel("Throughput", "perf/throughput", "tokens/s per device"),
    _panel("Drafts", "rollout/draft_acceptance rollout/drafts_per_step rollout/tokens_per_step"),
    _panel("Tokens of an update", "*/tokens_per_update */computed_tokens_per_update", "tokens"),
    replace(_panel("Step time", "timing_s/*", "s", "time", limit=12), kind="stack"),
    _panel("Waiting", "rollout/trainer_wait_s rollout/servers_wait_s", "s", "time"),
    _panel("Staleness", "staleness/mean staleness/max", "versions", "mismatch"),
    _panel("Rollout to trainer log-prob gap", "rollout/log_prob_mismatch* rollout/mismatch_kl*", "nats", "mismatch"),
    _panel("Response length", "response_length/mean response_length/max response_length/min", "tokens"),
    _panel("Memory", "memory/host_peak_gib perf/*reserved_gb memory/*_gib perf/*memory*_gb", "GiB", "memory", limit=5),
    _panel("Entropy", "actor/entropy*", "nats", limit=1),
    _panel("KL", "actor/*kl* critic/*kl*", "nats", limit=3),
    _panel("Clipped share", "actor/*clip* response_length/clip_ratio", limit=3),
    _panel(
        "Trainer to rollout probability ratio", "rollout/mismatch_ratio_p* rollout/mismatch_ratio_mean", "", "mismatch"
    ),
    _panel("Effective sample size", "rollout/mismatch*_ess* rollout/correction_ess", "", "mismatch"),
    _panel("Off-policy correction", "rollout/correction_weight_mean rollout/correction_outside_share", "", "mismatch"),
)
_GPU_MEMORY = "perf/max_memory_*_gb"


def is_measured(name: str, values: Sequence[float]) -> bool:
    """True for a metric that is shown: it has values, and they are not the 0 of GPU memory on a CPU."""
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
    panels = []
    for known in _KNOWN:
        names = _stack_parts(columns) if known.kind == "stack" else _matching(columns, known.metrics)
        if shown := tuple(names[: known.limit]):
            panels.append(replace(known, metrics=shown, unit=_unit(known, shown)))
    return (panels or [_panel(name, name) for name in columns])[:limit]


def single_panels(columns: Sequence[str]) -> list[Panel]:
    """One panel per metric, for comparing runs; step times give a single panel (the whole step)."""
    singles = []
    for panel in choose_panels(columns):
        is_stack = panel.kind == "stack"
        for name in ("timing_s/step",) if is_stack else panel.metrics:
            singles.append(_panel(name, name, _unit(panel, (name,)), "curves" if is_stack else panel.section))
    return singles


def _unit(panel: Panel, names: Sequence[str]) -> str:
    """GPUs count their memory in GB, hosts in GiB; every other unit is the panel's."""
    is_gb, is_gib = (any(name.endswith(end) for name in names) for end in ("_gb", "_gib"))
    return "GiB (host), GB (GPU)" if is_gb and is_gib else "GB" if is_gb else "GiB" if is_gib else panel.unit


def _matching(columns: Sequence[str], patterns: Sequence[str]) -> list[str]:
    names = [name for pattern in patterns for name in columns if fnmatch.fnmatchcase(name, pattern)]
    return list(dict.fromkeys(names))


def _stack_parts(columns: Sequence[str]) -> list[str]:
    """The top phases of a step, which add up to it; `other` last."""
    parts = [name for name in columns if name.startswith("timing_s/") and name.count("/") == 1]
    parts = [name for name in parts if name not in ("timing_s/step", "timing_s/other")]
    return parts + (["timing_s/other"] if parts and "timing_s/other" in columns else [])
