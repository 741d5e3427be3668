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
    from .report import write_comparison, write_report
    from .timing import PhaseTimer
    from .tracking import Progress, RunFolder, Tracker, TrackingConfig, check_tracking
    from .tracking.run_folder import EXPERIMENT_PATTERN

# Module -> its public names; nothing is imported before a name is used.
_MODULES = {
    ".cli": (
        "is_user_error",
        "run_cli",
    ),
    ".config.help": ("help_text",),
    ".config.loader": (
        "load_config",
        "to_yaml",
    ),
    ".errors": (
        "ConfigError",
        "ConfigProblem",
        "ReportError",
        "RunKitError",
        "TrackingError",
    ),
    ".memory": (
        "MemorySampler",
        "TreeMemory",
        "process_tree_memory",
    ),
    ".profiling": ("StepProfiler",),
    ".report": (
        "write_comparison",
        "write_report",
    ),
    ".timing": ("PhaseTimer",),
    ".tracking": (
        "Progress",
        "RunFolder",
        "Tracker",
        "TrackingConfig",
        "check_tracking",
    ),
    ".tracking.run_folder": ("EXPERIMENT_PATTERN",),
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "EXPERIMENT_PATTERN",
    "ConfigError",
    "ConfigProblem",
    "MemorySampler",
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
    "help_text",
    "is_user_error",
    "load_config",
    "process_tree_memory",
    "run_cli",
    "to_yaml",
    "write_comparison",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
