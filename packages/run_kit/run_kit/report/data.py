"""Reads the data of a report from a run folder."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import TrackingError
from ..tracking.metrics_table import MetricsTable
from ..tracking.rollouts import read_rollouts
from ..tracking.run_folder import RunFolder

MAX_ROLLOUTS = 2000
MAX_TEXT = 4000
_MAX_LOG_LINES = 300


@dataclass(frozen=True, kw_only=True)
class RunData:
    """One run. Rollouts are at most MAX_ROLLOUTS, spread over the run; `num_rollouts` counts those in the folder."""

    name: str
    table: MetricsTable
    supervised: MetricsTable | None
    rollouts: list[dict[str, Any]]
    num_rollouts: int
    config_text: str
    log_text: str


def read_run(folder: Path | str) -> RunData:
    """Read a run folder; only `metrics.tsv` is required, since a running job may lack the rest.

    Raises:
        TrackingError: a missing folder, no metrics, or malformed files.
    """
    run = RunFolder(folder)
    if not run.path.is_dir():
        raise TrackingError("no such run folder", field="run", value=str(folder), remedy="`plinth runs` lists them")
    if not run.metrics_file.exists():
        raise TrackingError("it does not exist; a report needs at least one logged step", field=str(run.metrics_file))
    rollouts = read_rollouts(run.rollouts_dir)
    return RunData(
        name=run.name,
        table=MetricsTable(run.metrics_file),
        supervised=MetricsTable(run.supervised_file) if run.supervised_file.exists() else None,
        rollouts=[fitting(record) for record in spread(rollouts, MAX_ROLLOUTS)],
        num_rollouts=len(rollouts),
        config_text=_text(run.config_file),
        log_text="\n".join(_text(run.log_file).splitlines()[-_MAX_LOG_LINES:]),
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def spread(records: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """At most `limit` records, evenly spaced."""
    return [records[index * len(records) // limit] for index in range(limit)] if len(records) > limit else records


def fitting(value: Any) -> Any:
    """A value for the page: a long text loses its middle (the answer is at its end), nan becomes null."""
    if isinstance(value, dict):
        return {key: fitting(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [fitting(inner) for inner in value]
    half = MAX_TEXT // 2
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return f"{value[:half]}\n[... {len(value) - 2 * half} characters left out ...]\n{value[-half:]}"
    return None if isinstance(value, float) and not math.isfinite(value) else value


def run_labels(folders: Sequence[Path | str]) -> dict[str, Path | str]:
    """Label -> run folder: the folder's name, or its whole path where names are the same."""
    names = [Path(folder).resolve().name for folder in folders]
    return {
        name if names.count(name) == 1 else str(folder): folder for name, folder in zip(names, folders, strict=True)
    }
