"""Run tracking: run folder, metrics table, curves, rollout samples, TensorBoard, W&B, log and progress."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import TrackingConfig
    from .curves import write_compared_curves, write_curves
    from .metrics_table import MetricsTable
    from .progress import Progress
    from .rollouts import read_rollouts, write_rollouts
    from .run_folder import RunFolder
    from .summary import MetricSummary, first_mean, summarize, tail_mean
    from .tracker import Tracker, check_tracking

_EXPORTS = {
    "TrackingConfig": ".config",
    "write_compared_curves": ".curves",
    "write_curves": ".curves",
    "MetricsTable": ".metrics_table",
    "Progress": ".progress",
    "read_rollouts": ".rollouts",
    "write_rollouts": ".rollouts",
    "RunFolder": ".run_folder",
    "MetricSummary": ".summary",
    "first_mean": ".summary",
    "summarize": ".summary",
    "tail_mean": ".summary",
    "Tracker": ".tracker",
    "check_tracking": ".tracker",
}

__all__ = [
    "MetricSummary",
    "MetricsTable",
    "Progress",
    "RunFolder",
    "Tracker",
    "TrackingConfig",
    "check_tracking",
    "first_mean",
    "read_rollouts",
    "summarize",
    "tail_mean",
    "write_compared_curves",
    "write_curves",
    "write_rollouts",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
