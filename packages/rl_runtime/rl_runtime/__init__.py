"""Config loading, tracking, timing, placement and the training loop that composes the other packages."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app.inputs import Inputs, load_inputs
    from .app.job import Algorithm, Job, check_job, job_layout, run_job
    from .app.job_config import JobConfig
    from .app.preflight import (
        check_engine,
        check_lengths,
        check_prompt_files,
        check_sequence_parallel,
        check_servers,
        check_supervised,
        find_checkpoint,
    )
    from .config import ModelConfig, RanksConfig, SupervisedConfig, TaskSize, TrainerConfig
    from .errors import (
        InputError,
        PlacementError,
        RankError,
        RlRuntimeError,
        RolloutFailed,
    )
    from .experience import Experience, ExperienceBatch, PromptLike
    from .launch.placement import Placement, plan_placement
    from .launch.session import Session, open_ranks, open_session, plan_ranks, plan_session
    from .ranks.environment import prepare_driver
    from .ranks.worker_group import RankGroup
    from .ranks.model_handle import Role, together
    from .rollout.phase import RolloutPhase, Validation
    from .rollout.scoring import Scorer
    from .rollout.servers import RolloutServers
    from .training.checkpoints import Stateful
    from .training.loop import LoopResult, Phase, TrainingLoop
    from .training.metrics import mismatch, rollout_metrics, throughput, update_metrics
    from .training.policy import PolicyConfig, policy_loss, with_loss_weights
    from .training.supervised import supervised_step, train_supervised

# Public name -> module that defines it; nothing is imported before a name is used. One line a name, sorted by module.
_EXPORTS = {
    "check_engine": ".app.preflight",
    "check_lengths": ".app.preflight",
    "check_prompt_files": ".app.preflight",
    "check_sequence_parallel": ".app.preflight",
    "check_servers": ".app.preflight",
    "check_supervised": ".app.preflight",
    "find_checkpoint": ".app.preflight",
    "prepare_driver": ".ranks.environment",
    "ModelConfig": ".config",
    "RanksConfig": ".config",
    "SupervisedConfig": ".config",
    "TaskSize": ".config",
    "TrainerConfig": ".config",
    "InputError": ".errors",
    "PlacementError": ".errors",
    "RankError": ".errors",
    "RlRuntimeError": ".errors",
    "RolloutFailed": ".errors",
    "Experience": ".experience",
    "ExperienceBatch": ".experience",
    "PromptLike": ".experience",
    "Inputs": ".app.inputs",
    "load_inputs": ".app.inputs",
    "Algorithm": ".app.job",
    "Job": ".app.job",
    "check_job": ".app.job",
    "job_layout": ".app.job",
    "run_job": ".app.job",
    "JobConfig": ".app.job_config",
    "LoopResult": ".training.loop",
    "Phase": ".training.loop",
    "Stateful": ".training.checkpoints",
    "TrainingLoop": ".training.loop",
    "mismatch": ".training.metrics",
    "rollout_metrics": ".training.metrics",
    "throughput": ".training.metrics",
    "update_metrics": ".training.metrics",
    "Placement": ".launch.placement",
    "plan_placement": ".launch.placement",
    "PolicyConfig": ".training.policy",
    "policy_loss": ".training.policy",
    "with_loss_weights": ".training.policy",
    "RankGroup": ".ranks.worker_group",
    "Role": ".ranks.model_handle",
    "together": ".ranks.model_handle",
    "RolloutPhase": ".rollout.phase",
    "Validation": ".rollout.phase",
    "RolloutServers": ".rollout.servers",
    "Scorer": ".rollout.scoring",
    "Session": ".launch.session",
    "open_ranks": ".launch.session",
    "open_session": ".launch.session",
    "plan_ranks": ".launch.session",
    "plan_session": ".launch.session",
    "supervised_step": ".training.supervised",
    "train_supervised": ".training.supervised",
}

__all__ = [
    "Algorithm",
    "Experience",
    "ExperienceBatch",
    "InputError",
    "Inputs",
    "Job",
    "JobConfig",
    "LoopResult",
    "ModelConfig",
    "Phase",
    "Placement",
    "PlacementError",
    "PolicyConfig",
    "PromptLike",
    "RankError",
    "RankGroup",
    "RanksConfig",
    "RlRuntimeError",
    "Role",
    "RolloutFailed",
    "RolloutPhase",
    "RolloutServers",
    "Scorer",
    "Session",
    "Stateful",
    "SupervisedConfig",
    "TaskSize",
    "TrainerConfig",
    "TrainingLoop",
    "Validation",
    "check_engine",
    "check_job",
    "check_lengths",
    "check_prompt_files",
    "check_sequence_parallel",
    "check_servers",
    "check_supervised",
    "find_checkpoint",
    "job_layout",
    "load_inputs",
    "mismatch",
    "open_ranks",
    "open_session",
    "plan_placement",
    "plan_ranks",
    "plan_session",
    "policy_loss",
    "prepare_driver",
    "rollout_metrics",
    "run_job",
    "supervised_step",
    "throughput",
    "together",
    "train_supervised",
    "update_metrics",
    "with_loss_weights",
]


# Deprecated since 0.2.0: they live in run_kit.
_MOVED_TO_RUN_KIT = frozenset(
    (
        "ConfigError",
        "MemorySampler",
        "PhaseTimer",
        "Progress",
        "ReportError",
        "RunFolder",
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
    )
)


def __getattr__(name: str) -> Any:
    if name in _MOVED_TO_RUN_KIT:
        warnings.warn(f"rl_runtime.{name} is deprecated: import run_kit.{name}", DeprecationWarning, stacklevel=2)
        return getattr(import_module("run_kit"), name)
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
