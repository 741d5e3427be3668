"""What any experiment needs: command line, typed config, run folder and metrics, report, timing, memory, profiling."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cli import is_user_error, run_cli
    from .config.help import help_text
    from .config.loader import load_config, to_yaml
    from .errors import ConfigError, ConfigProblem, ReportError, RunKitError, TrackingError
    from .memory import MemorySampler, TreeMemory, process_tree_memory
    from .profiling import StepProfiler
    from .report.comparison import write_comparison
    from .report.page import write_report
    from .timing import PhaseTimer
    from .tracker import Tracker, check_tracking
    from .tracking.config import TrackingConfig
    from .tracking.curves import write_compared_curves, write_curves
    from .tracking.metrics_table import MetricsTable
    from .tracking.progress import Progress
    from .tracking.rollouts import read_rollouts, write_rollouts
    from .tracking.run_folder import EXPERIMENT_PATTERN, RunFolder
    from .tracking.summary import MetricSummary, first_mean, summarize, tail_mean

# Module -> its public names; nothing is imported before a name is used.
_MODULES = {
    ".cli": ("is_user_error", "run_cli"),
    ".config.help": ("help_text",),
    ".config.loader": ("load_config", "to_yaml"),
    ".errors": ("ConfigError", "ConfigProblem", "ReportError", "RunKitError", "TrackingError"),
    ".memory": ("MemorySampler", "TreeMemory", "process_tree_memory"),
    ".profiling": ("StepProfiler",),
    ".report.comparison": ("write_comparison",),
    ".report.page": ("write_report",),
    ".timing": ("PhaseTimer",),
    ".tracker": ("Tracker", "check_tracking"),
    ".tracking.config": ("TrackingConfig",),
    ".tracking.curves": ("write_compared_curves", "write_curves"),
    ".tracking.metrics_table": ("MetricsTable",),
    ".tracking.progress": ("Progress",),
    ".tracking.rollouts": ("read_rollouts", "write_rollouts"),
    ".tracking.run_folder": ("EXPERIMENT_PATTERN", "RunFolder"),
    ".tracking.summary": ("MetricSummary", "first_mean", "summarize", "tail_mean"),
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "EXPERIMENT_PATTERN",
    "ConfigError",
    "ConfigProblem",
    "MemorySampler",
    "MetricSummary",
    "MetricsTable",
    "PhaseTimer",
    "Progress",
    "ReportError",
    "RunFolder",
    "RunKitError",
    "StepProfiler",
    "Tracker",
    "TrackingConfig",
    "TrackingError",
    "TreeMemory",
    "check_tracking",
    "first_mean",
    "help_text",
    "is_user_error",
    "load_config",
    "process_tree_memory",
    "read_rollouts",
    "run_cli",
    "summarize",
    "tail_mean",
    "to_yaml",
    "write_compared_curves",
    "write_comparison",
    "write_curves",
    "write_report",
    "write_rollouts",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
