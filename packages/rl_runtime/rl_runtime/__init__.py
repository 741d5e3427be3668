"""Config loading, tracking, timing, placement and the training loop that composes the other packages."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoints import Stateful
    from .checks import (
        check_engine,
        check_lengths,
        check_prompt_files,
        check_sequence_parallel,
        check_servers,
        check_supervised,
        find_checkpoint,
    )
    from .cli import is_user_error, run_cli
    from .config import ModelConfig, RanksConfig, SupervisedConfig, TaskSize, TrainerConfig
    from .config_help import help_text
    from .config_loader import load_config, to_yaml
    from .environment import prepare_driver
    from .errors import (
        ConfigError,
        InputError,
        PlacementError,
        RankError,
        ReportError,
        RlRuntimeError,
        RolloutFailed,
        TrackingError,
    )
    from .experience import Experience, ExperienceBatch, PromptLike
    from .inputs import Inputs, load_inputs
    from .job import Algorithm, Job, check_job, job_layout, run_job
    from .job_config import JobConfig
    from .loop import LoopResult, Phase, TrainingLoop
    from .memory import MemorySampler, TreeMemory, process_tree_memory
    from .metrics import mismatch, rollout_metrics, throughput, update_metrics
    from .placement import Placement, plan_placement
    from .policy import PolicyConfig, policy_loss, with_loss_weights
    from .rank_group import RankGroup
    from .report import write_comparison, write_report
    from .role import Role, together
    from .rollout_phase import RolloutPhase, Validation
    from .rollout_servers import RolloutServers
    from .scoring import Scorer
    from .session import Session, open_ranks, open_session, plan_ranks, plan_session
    from .supervised import supervised_step, train_supervised
    from .timing import PhaseTimer
    from .tracking import Progress, RunFolder, Tracker, TrackingConfig, check_tracking

# Public name -> module that defines it; nothing is imported before a name is used. One line a name, sorted by module.
_EXPORTS = {
    "check_engine": ".checks",
    "check_lengths": ".checks",
    "check_prompt_files": ".checks",
    "check_sequence_parallel": ".checks",
    "check_servers": ".checks",
    "check_supervised": ".checks",
    "find_checkpoint": ".checks",
    "check_tracking": ".tracking",
    "prepare_driver": ".environment",
    "is_user_error": ".cli",
    "run_cli": ".cli",
    "ModelConfig": ".config",
    "RanksConfig": ".config",
    "SupervisedConfig": ".config",
    "TaskSize": ".config",
    "TrainerConfig": ".config",
    "help_text": ".config_help",
    "load_config": ".config_loader",
    "to_yaml": ".config_loader",
    "ConfigError": ".errors",
    "InputError": ".errors",
    "PlacementError": ".errors",
    "RankError": ".errors",
    "ReportError": ".errors",
    "RlRuntimeError": ".errors",
    "RolloutFailed": ".errors",
    "TrackingError": ".errors",
    "Experience": ".experience",
    "ExperienceBatch": ".experience",
    "PromptLike": ".experience",
    "Inputs": ".inputs",
    "load_inputs": ".inputs",
    "Algorithm": ".job",
    "Job": ".job",
    "check_job": ".job",
    "job_layout": ".job",
    "run_job": ".job",
    "JobConfig": ".job_config",
    "LoopResult": ".loop",
    "Phase": ".loop",
    "Stateful": ".checkpoints",
    "TrainingLoop": ".loop",
    "MemorySampler": ".memory",
    "TreeMemory": ".memory",
    "process_tree_memory": ".memory",
    "mismatch": ".metrics",
    "rollout_metrics": ".metrics",
    "throughput": ".metrics",
    "update_metrics": ".metrics",
    "Placement": ".placement",
    "plan_placement": ".placement",
    "PolicyConfig": ".policy",
    "policy_loss": ".policy",
    "with_loss_weights": ".policy",
    "RankGroup": ".rank_group",
    "write_comparison": ".report",
    "write_report": ".report",
    "Role": ".role",
    "together": ".role",
    "RolloutPhase": ".rollout_phase",
    "Validation": ".rollout_phase",
    "RolloutServers": ".rollout_servers",
    "Scorer": ".scoring",
    "Session": ".session",
    "open_ranks": ".session",
    "open_session": ".session",
    "plan_ranks": ".session",
    "plan_session": ".session",
    "supervised_step": ".supervised",
    "train_supervised": ".supervised",
    "PhaseTimer": ".timing",
    "Progress": ".tracking",
    "RunFolder": ".tracking",
    "Tracker": ".tracking",
    "TrackingConfig": ".tracking",
}

__all__ = [
    "Algorithm",
    "ConfigError",
    "Experience",
    "ExperienceBatch",
    "InputError",
    "Inputs",
    "Job",
    "JobConfig",
    "LoopResult",
    "MemorySampler",
    "ModelConfig",
    "Phase",
    "PhaseTimer",
    "Placement",
    "PlacementError",
    "PolicyConfig",
    "Progress",
    "PromptLike",
    "RankError",
    "RankGroup",
    "RanksConfig",
    "ReportError",
    "RlRuntimeError",
    "Role",
    "RolloutFailed",
    "RolloutPhase",
    "RolloutServers",
    "RunFolder",
    "Scorer",
    "Session",
    "Stateful",
    "SupervisedConfig",
    "TaskSize",
    "Tracker",
    "TrackingConfig",
    "TrackingError",
    "TrainerConfig",
    "TrainingLoop",
    "TreeMemory",
    "Validation",
    "check_engine",
    "check_job",
    "check_lengths",
    "check_prompt_files",
    "check_sequence_parallel",
    "check_servers",
    "check_supervised",
    "check_tracking",
    "find_checkpoint",
    "help_text",
    "is_user_error",
    "job_layout",
    "load_config",
    "load_inputs",
    "mismatch",
    "open_ranks",
    "open_session",
    "plan_placement",
    "plan_ranks",
    "plan_session",
    "policy_loss",
    "prepare_driver",
    "process_tree_memory",
    "rollout_metrics",
    "run_cli",
    "run_job",
    "supervised_step",
    "throughput",
    "to_yaml",
    "together",
    "train_supervised",
    "update_metrics",
    "with_loss_weights",
    "write_comparison",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
