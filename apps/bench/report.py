"""Writes a benchmark's results: tables, curves, HTML page and `report.md`."""

import os
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import psutil

from apps.bench.config import AlgorithmsConfig, BenchConfig, StageGateConfig
from apps.bench.curves import write_learning_curves
from apps.bench.plan import Case
from apps.bench.results import (
    CaseResult,
    Row,
    algorithm_rows,
    cell_text,
    compare_rows,
    overall_rows,
    summary_rows,
    tsv_text,
)
from ckpt import package_versions
from run_kit import MetricsTable, write_compared_curves, write_comparison
from run_kit.config.redaction import yaml_without_secrets
from run_kit.tracking.metrics_table import atomic_write

_NOT_IN_REPORT = (
    *("app", "stage", "offload", "step_each_micro", "seed", "steps", "wall_s"),  # of the summary
    *("change_std", "confidence"),  # of the gate
)


def write_tables(config: BenchConfig, cases: Sequence[Case], reached: Mapping[str, CaseResult], folder: Path) -> None:
    """Write `summary.tsv` and the tables of the gate and of the algorithms; rewritten after every case."""
    atomic_write(folder / "summary.tsv", tsv_text(summary_rows(cases, reached)))
    if isinstance(config, StageGateConfig):
        atomic_write(folder / "compare.tsv", tsv_text(compare_rows(config, reached)))
        atomic_write(folder / "overall.tsv", tsv_text(overall_rows(config, reached)))
    if isinstance(config, AlgorithmsConfig):
        atomic_write(folder / "algorithms.tsv", tsv_text(algorithm_rows(config, reached)))


def write_report(
    config: BenchConfig, cases: Sequence[Case], reached: Mapping[str, CaseResult], folder: Path, *, command: str
) -> None:
    """Write `report.md`, and `curves.png` and `report.html` about all cases with metrics."""
    runs = {case.name: folder / case.name for case in cases if (folder / case.name / "metrics.tsv").exists()}
    drawn = None
    if runs:
        tables = {name: MetricsTable(path / "metrics.tsv") for name, path in runs.items()}
        drawn = write_compared_curves(tables, folder / "curves.png", title=folder.name)
    if len(runs) > 1:
        write_comparison(runs, folder / "report.html", title=folder.name)
    parts = [
        f"# {folder.name}",
        f"{len(cases)} cases of {config.steps} steps; averages are over the last five. "
        "Throughput is tokens per second and GPU (on the CPU: of the machine).",
        f"```\n{command}\n```",
        markdown_table(summary_rows(cases, reached), leave_out=_NOT_IN_REPORT),
    ]
    if isinstance(config, StageGateConfig):
        parts += [
            "## ZeRO-2 against ZeRO-1",
            f"`change` is z2 - z1 for the score and (z2 - z1) / z1 for the others; low and high bound its mean over "
            f"seeds with confidence {config.confidence:g} (Student's t). `pass`: the interval lies within what is "
            "allowed; `fail`: all of it lies outside; `inconclusive`: neither. With one seed there is no interval, and "
            "the change itself decides.",
            markdown_table(overall_rows(config, reached), leave_out=_NOT_IN_REPORT),
            "## Pairs",
            markdown_table(compare_rows(config, reached)),
        ]
    if isinstance(config, AlgorithmsConfig):
        write_learning_curves(config, folder)
        parts += [
            "## Held-out accuracy",
            f"Before the first and after the last step, for each seed. `pass`: a gain of at least {config.min_gain:g} "
            "with every seed.",
            markdown_table(algorithm_rows(config, reached)),
            *(f"![{preset}](curves/{preset}.svg)" for preset in config.presets),
        ]
    if drawn:
        parts += ["## Curves", "![curves of all cases](curves.png)"]
    if len(runs) > 1:
        parts.append("All metrics, time by phase and rollouts: [report.html](report.html).")
    parts += ["## Environment", environment_text(), "## Configuration", f"```yaml\n{yaml_without_secrets(config)}```"]
    atomic_write(folder / "report.md", "\n\n".join(parts) + "\n")


def markdown_table(rows: Sequence[Row], leave_out: Sequence[str] = ()) -> str:
    """The other non-empty columns of the rows as a Markdown table."""
    columns = [name for name in rows[0] if name not in leave_out and any(cell_text(row[name]) for row in rows)]
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for cells in ([row[name] for name in columns] for row in rows):
        texts = [f"{cell:.4g}" if isinstance(cell, float) and cell == cell else cell_text(cell) for cell in cells]
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)


def environment_text() -> str:
    """Machine, devices and versions as a Markdown list."""
    gpus = _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader").splitlines()
    kinds = "; ".join(f"{number} x {kind}" for kind, number in Counter(gpus).items())
    versions = package_versions()
    lines = [
        f"date: {datetime.now():%Y-%m-%d %H:%M}",
        f"machine: {platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} CPU cores, "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        f"GPUs: {kinds or 'none'}",
        f"Python {versions.pop('python')}, " + ", ".join(f"{name} {version}" for name, version in versions.items()),
        f"commit: {_output('git', 'describe', '--always', '--dirty') or 'unknown'}",
    ]
    return "\n".join(f"* {line}" for line in lines)


def _output(*command: str) -> str:
    """Output of a command; empty if the command is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip() if done.returncode == 0 else ""
