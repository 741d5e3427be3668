"""Rows of the benchmark's tables. Pure except for reading run folders."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev

from scipy.special import stdtrit

from apps.bench.config import StageGateConfig
from apps.bench.plan import Case, gate_name
from apps.tables import Row
from run_kit import MetricsTable, tail_mean

KEY_METRICS = ("critic/score/mean", "perf/throughput", "perf/max_memory_reserved_gb", "timing_s/step")
Interval = tuple[float, float]


def summary_row(case: Case, folder: Path, *, exit_code: int, attempts: int, wall_s: float) -> Row:
    """Row of `summary.tsv`; nan where not measured. GPU memory is that of a rank, in 1e9 bytes."""
    table = MetricsTable(folder / "metrics.tsv")

    def values(name: str) -> list[float]:
        return table.series(name)[1]

    facts = {key: value for key, value in asdict(case).items() if key != "arguments"}
    last_step = max(table.series("timing_s/step")[0], default=0)
    reserved = [value for value in values("perf/max_memory_reserved_gb") if value > 0]  # 0 on the CPU
    return {
        "case": facts.pop("name"),
        **facts,
        "status": "completed" if exit_code == 0 and last_step >= case.steps else "failed",
        "last_step": last_step,
        "avg_score_tail5": tail_mean(values("critic/score/mean"), 5),
        "avg_throughput_tail5": tail_mean(values("perf/throughput"), 5),
        "avg_step_s_tail5": tail_mean(values("timing_s/step"), 5),
        "peak_mem_reserved_gb": max(reserved, default=math.nan),
        "avg_mem_reserved_gb_tail5": tail_mean(reserved, 5),
        "peak_host_gib": max(values("memory/host_peak_gib"), default=math.nan),
        "skipped_micro_batches": sum(values("actor/skipped_inactive_micro")) if table.steps else math.nan,
        "attempts": attempts,
        "wall_s": wall_s,
    }


def key_metric_rows(tables: Mapping[str, MetricsTable]) -> list[Row]:
    """First, last, mean, smallest and largest value of the main metrics of each case."""
    rows = []
    for name, table in tables.items():
        for metric in KEY_METRICS:
            if values := table.series(metric)[1]:
                row = {"case": name, "metric": metric, "first": values[0], "last": values[-1]}
                rows.append(row | {"mean": fmean(values), "min": min(values), "max": max(values)})
    return rows


def _quantities(config: StageGateConfig) -> dict[str, tuple[str, Interval]]:
    """Compared quantity -> its column of `summary.tsv` and the allowed range of its change."""
    less = (-math.inf, config.memory_threshold)
    return {
        # Parity: a better score counts as a difference, like a worse one.
        "score": ("avg_score_tail5", (-config.score_threshold, config.score_threshold)),
        "throughput": ("avg_throughput_tail5", (-config.throughput_threshold, math.inf)),
        "peak_mem_reserved_gb": ("peak_mem_reserved_gb", less),
        "mem_reserved_gb_tail5": ("avg_mem_reserved_gb_tail5", less),
        "peak_host_gib": ("peak_host_gib", less),
    }


def compare_rows(config: StageGateConfig, summary: Sequence[Row]) -> list[Row]:
    """Rows of `compare.tsv`: one per seed and `step_each_micro`, with z1, z2 and z2 - z1."""
    by_name = {row["case"]: row for row in summary}
    rows: list[Row] = []
    for each in config.step_each_micro:
        for seed in config.seeds:
            one, two = (by_name.get(gate_name(seed, which), {"status": "waiting"}) for which in (None, each))
            row = {"step_each_micro": int(each), "seed": seed, "z1_status": one["status"], "z2_status": two["status"]}
            for name, (column, _) in _quantities(config).items():
                z1, z2 = (side.get(column, math.nan) for side in (one, two))
                row |= {f"{name}_z1": z1, f"{name}_z2": z2, f"{name}_delta": z2 - z1}
            rows.append(row)
    return rows


def overall_rows(config: StageGateConfig, pairs: Sequence[Row]) -> list[Row]:
    """Rows of `overall.tsv`, made of those of `compare.tsv`: one per `step_each_micro` and quantity.

    `change` is z2 - z1 for the score and (z2 - z1) / z1 for the others; interval and allowed range refer to `change`.
    """
    rows: list[Row] = []
    completed = [pair for pair in pairs if pair["z1_status"] == pair["z2_status"] == "completed"]
    for each in config.step_each_micro:
        for name, (_, allowed) in _quantities(config).items():
            values = [(p[f"{name}_z1"], p[f"{name}_z2"]) for p in completed if p["step_each_micro"] == each]
            measured = [(z1, z2) for z1, z2 in values if math.isfinite(z2 - z1) and (z1 or name == "score")]
            changes = [z2 - z1 if name == "score" else (z2 - z1) / z1 for z1, z2 in measured]
            z1_mean, z2_mean = (fmean([pair[side] for pair in measured] or [math.nan]) for side in (0, 1))
            interval = mean_interval(changes, config.confidence)
            row: Row = {"step_each_micro": int(each), "metric": name, "num_seeds": len(changes)}
            row |= {"z1_mean": z1_mean, "z2_mean": z2_mean, "delta_mean": z2_mean - z1_mean}
            row["change_mean"] = fmean(changes or [math.nan])
            row["change_low"], row["change_high"] = interval if len(changes) > 1 else (None, None)
            row["allowed_low"], row["allowed_high"] = allowed
            rows.append(row | {"verdict": verdict(interval, allowed)})
    return rows


def mean_interval(values: Sequence[float], confidence: float) -> Interval:
    """Confidence interval of the mean by Student's t; one value is its own interval, no value gives nan."""
    if len(values) < 2:
        return (values[0], values[0]) if values else (math.nan, math.nan)
    half = float(stdtrit(len(values) - 1, (1 + confidence) / 2)) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def verdict(interval: Interval, allowed: Interval) -> str:
    """`pass` if the interval lies inside the allowed range, `fail` if outside, else `inconclusive`."""
    (low, high), (least, most) = interval, allowed
    if math.isnan(low):
        return "not measured"
    if least <= low and high <= most:
        return "pass"
    return "fail" if high < least or low > most else "inconclusive"
