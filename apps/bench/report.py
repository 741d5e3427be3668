"""Writes `report.md` and `report.html` about all cases."""

from collections.abc import Sequence
from pathlib import Path

from apps.bench.config import BenchConfig, StageGateConfig
from apps.bench.results import compare_rows, key_metric_rows, overall_rows
from apps.tables import Row, markdown_table
from ckpt import package_versions
from run_kit import MetricsTable, write_comparison
from run_kit.config.redaction import yaml_without_secrets
from run_kit.tracking.metrics_table import atomic_write


def write_report(config: BenchConfig, summary: Sequence[Row], folder: Path, *, command: str) -> None:
    """Write the two files from the rows of `summary.tsv` and the cases' metrics."""
    from torch.utils.collect_env import get_pretty_env_info

    runs = {path.parent.name: path.parent for row in summary for path in folder.glob(f"{row['case']}/metrics.tsv")}
    tables = {name: MetricsTable(path / "metrics.tsv") for name, path in runs.items()}
    parts = [
        f"# {folder.name}",
        f"{len(summary)} cases of {config.steps} steps; averages are over the last five. "
        "Throughput is tokens per second and GPU (on the CPU: of the machine).",
        f"```\n{command}\n```",
        markdown_table(summary),
    ]
    if isinstance(config, StageGateConfig):
        pairs = compare_rows(config, summary)
        parts += [
            "## ZeRO-2 against ZeRO-1",
            "`change` is z2 - z1 for the score and (z2 - z1) / z1 for the others; low and high bound its mean over "
            f"seeds with confidence {config.confidence:g} (Student's t). `pass`: the interval lies within what is "
            "allowed; `fail`: all of it lies outside; `inconclusive`: neither. With one seed there is no interval, and "
            "the change itself decides.",
            markdown_table(overall_rows(config, pairs)),
            "## Pairs",
            markdown_table(pairs),
        ]
    parts += ["## Key metrics", markdown_table(key_metric_rows(tables))]
    if len(runs) > 1:
        write_comparison(runs, folder / "report.html", title=folder.name)
        parts.append("Curves, all metrics, time by phase and rollouts: [report.html](report.html).")
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    parts += ["## Environment", versions, f"```\n{get_pretty_env_info()}\n```"]
    parts += ["## Configuration", f"```yaml\n{yaml_without_secrets(config)}```"]
    atomic_write(folder / "report.md", "\n\n".join(parts) + "\n")
