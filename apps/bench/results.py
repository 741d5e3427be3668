"""Results of the cases and the tables made from them. Pure except for reading run folders."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from apps.bench.config import AlgorithmsConfig, StageGateConfig
from apps.bench.plan import Case, algorithm_name, zero1_name, zero2_name
from apps.bench.statistics import Interval, judge
from run_kit import MetricsTable, tail_mean

TAIL = 5
"""Number of final steps in the tail averages."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """Result of one case; nan where not measured. GPU memory is that of a rank, in GB (1e9 bytes)."""

    status: str = "waiting"
    attempts: int = 0
    wall_s: float = math.nan
    last_step: int = 0
    score: float = math.nan
    throughput: float = math.nan
    step_s: float = math.nan
    peak_reserved_gb: float = math.nan
    tail_reserved_gb: float = math.nan
    peak_host_gib: float = math.nan
    skipped_micro_batches: float = math.nan
    accuracy_before: float = math.nan
    """Held-out accuracy before the first step; `accuracy_after`: after the last one."""
    accuracy_after: float = math.nan


def read_result(folder: Path, *, status: str, attempts: int = 1, wall_s: float = math.nan) -> CaseResult:
    """Read a result from the metrics of a run folder; all nan for a run without logged steps."""
    table = MetricsTable(folder / "metrics.tsv")

    def values(name: str) -> list[float]:
        return table.series(name)[1]

    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):  # the run has not ended
        summary = {}
    accuracy = {name: summary.get(name) for name in ("accuracy_before", "accuracy_after")}
    reserved = [value for value in values("perf/max_memory_reserved_gb") if value > 0]  # 0 on the CPU
    return CaseResult(
        status=status,
        attempts=attempts,
        wall_s=wall_s,
        last_step=max(table.series("timing_s/step")[0], default=0),
        score=tail_mean(values("critic/score/mean"), TAIL),
        throughput=tail_mean(values("perf/throughput"), TAIL),
        step_s=tail_mean(values("timing_s/step"), TAIL),
        peak_reserved_gb=max(reserved, default=math.nan),
        tail_reserved_gb=tail_mean(reserved, TAIL),
        peak_host_gib=max(values("memory/host_peak_gib"), default=math.nan),
        skipped_micro_batches=sum(values("actor/skipped_inactive_micro")) if table.steps else math.nan,
        **{name: math.nan if value is None else value for name, value in accuracy.items()},
    )


def summary_rows(cases: Sequence[Case], reached: Mapping[str, CaseResult]) -> list[Row]:
    """Rows of `summary.tsv`: one per case."""
    pairs = [(case, reached.get(case.name, CaseResult())) for case in cases]
    return [
        {
            "case": case.name,
            "app": case.app,
            "stage": case.stage,
            "offload": case.offload,
            "step_each_micro": int(case.step_each_micro),
            "seed": case.seed,
            "status": found.status,
            "last_step": found.last_step,
            "steps": case.steps,
            "avg_score_tail5": found.score,
            "avg_throughput_tail5": found.throughput,
            "avg_step_s_tail5": found.step_s,
            "peak_mem_reserved_gb": found.peak_reserved_gb,
            "avg_mem_reserved_gb_tail5": found.tail_reserved_gb,
            "peak_host_gib": found.peak_host_gib,
            "skipped_micro_batches": found.skipped_micro_batches,
            "attempts": found.attempts,
            "wall_s": found.wall_s,
        }
        for case, found in pairs
    ]


@dataclass(frozen=True, kw_only=True)
class _Metric:
    """A compared quantity: its field, whether its difference is relative to ZeRO-1, and the allowed range."""

    name: str
    field: str
    relative: bool
    allowed: Interval


def _metrics(config: StageGateConfig) -> list[_Metric]:
    score, throughput, memory = config.score_threshold, config.throughput_threshold, config.memory_threshold
    less = Interval(low=-math.inf, high=memory)
    return [
        # Parity: a better score counts as a difference, like a worse one.
        _Metric(name="score", field="score", relative=False, allowed=Interval(low=-score, high=score)),
        _Metric(name="throughput", field="throughput", relative=True, allowed=Interval(low=-throughput, high=math.inf)),
        _Metric(name="peak_mem_reserved_gb", field="peak_reserved_gb", relative=True, allowed=less),
        _Metric(name="mem_reserved_gb_tail5", field="tail_reserved_gb", relative=True, allowed=less),
        _Metric(name="peak_host_gib", field="peak_host_gib", relative=True, allowed=less),
    ]


def compare_rows(config: StageGateConfig, reached: Mapping[str, CaseResult]) -> list[Row]:
    """Rows of `compare.tsv`: one per seed and `step_each_micro`, with z1, z2 and z2 - z1."""
    rows: list[Row] = []
    for each in config.step_each_micro:
        for seed in config.seeds:
            one, two = _pair(reached, seed, each)
            row: Row = {"step_each_micro": int(each), "seed": seed, "z1_status": one.status, "z2_status": two.status}
            for metric in _metrics(config):
                z1, z2 = getattr(one, metric.field), getattr(two, metric.field)
                row |= {f"{metric.name}_z1": z1, f"{metric.name}_z2": z2, f"{metric.name}_delta": z2 - z1}
            rows.append(row)
    return rows


def overall_rows(config: StageGateConfig, reached: Mapping[str, CaseResult]) -> list[Row]:
    """Rows of `overall.tsv`: the verdict over all seeds, one per `step_each_micro` and quantity.

    `change` is z2 - z1 for the score and (z2 - z1) / z1 for the others; interval and allowed range refer to `change`.
    """
    rows: list[Row] = []
    for each in config.step_each_micro:
        found = [_pair(reached, seed, each) for seed in config.seeds]
        both = [(one, two) for one, two in found if one.status == two.status == "completed"]
        for metric in _metrics(config):
            values = [(getattr(one, metric.field), getattr(two, metric.field)) for one, two in both]
            measured = [(z1, z2) for z1, z2 in values if math.isfinite(z1) and math.isfinite(z2)]
            changes = [z2 - z1 for z1, z2 in measured]
            if metric.relative:
                changes = [(z2 - z1) / z1 if z1 else math.nan for z1, z2 in measured]
            judgement = judge(changes, metric.allowed, confidence=config.confidence)
            z1, z2 = (fmean([pair[i] for pair in measured] or [math.nan]) for i in (0, 1))
            interval = judgement.interval
            rows.append(
                {
                    "step_each_micro": int(each),
                    "metric": metric.name,
                    "num_seeds": judgement.num_seeds,
                    "z1_mean": z1,
                    "z2_mean": z2,
                    "delta_mean": z2 - z1,
                    "change_mean": judgement.mean,
                    "change_std": judgement.std,
                    "confidence": config.confidence if interval else None,
                    "change_low": interval.low if interval else None,
                    "change_high": interval.high if interval else None,
                    "allowed_low": metric.allowed.low,
                    "allowed_high": metric.allowed.high,
                    "verdict": judgement.verdict,
                }
            )
    return rows


def _pair(reached: Mapping[str, CaseResult], seed: int, each: bool) -> tuple[CaseResult, CaseResult]:
    return reached.get(zero1_name(seed), CaseResult()), reached.get(zero2_name(seed, each), CaseResult())


def algorithm_rows(config: AlgorithmsConfig, reached: Mapping[str, CaseResult]) -> list[Row]:
    """Rows of `algorithms.tsv`: held-out accuracy of each preset before and after, and its gain with every seed."""
    rows: list[Row] = []
    for preset in config.presets:
        found = [reached.get(algorithm_name(preset, seed), CaseResult()) for seed in config.seeds]
        gains = [one.accuracy_after - one.accuracy_before for one in found]
        done = all(one.status == "completed" for one in found)
        row: Row = {"preset": preset}
        for seed, one in zip(config.seeds, found, strict=True):
            row |= {f"before_seed{seed}": one.accuracy_before, f"after_seed{seed}": one.accuracy_after}
        row |= {"gain_mean": fmean(gains), "gain_min": math.nan if any(map(math.isnan, gains)) else min(gains)}
        row |= {"wall_s_mean": fmean(one.wall_s for one in found)}
        row["verdict"] = ("pass" if row["gain_min"] >= config.min_gain else "fail") if done else "incomplete"
        rows.append(row)
    return rows


def tsv_text(rows: Sequence[Row]) -> str:
    """Rows with equal keys as a tab-separated table; missing values are empty."""
    lines = ["\t".join(rows[0])] if rows else []
    lines += ["\t".join(cell_text(value) for value in row.values()) for row in rows]
    return "".join(f"{line}\n" for line in lines)


def cell_text(value: Any) -> str:
    """A value formatted for a table."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
