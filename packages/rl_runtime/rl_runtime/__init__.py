"""Composes the other packages into training runs: placement, trainer ranks, rollout, the training loop."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

import run_kit

if TYPE_CHECKING:
    from .app.inputs import Inputs, load_inputs
    from .app.job import Algorithm, Job, JobPlan, check_job, job_layout, run_job
    from .app.job_config import JobConfig, run_job_cli
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
    from .errors import InputError, PlacementError, RankError, RlRuntimeError, RolloutFailed
    from .experience import Experience, ExperienceBatch, Phase, PromptLike
    from .launch.placement import Placement, plan_placement
    from .launch.session import Session, open_ranks, open_session, plan_ranks, plan_session
    from .ranks.environment import prepare_driver
    from .ranks.loss_spec import LossSpec
    from .ranks.model_handle import ModelHandle, run_concurrently
    from .ranks.train_batch import MiniBatch, TrainBatch
    from .ranks.worker_group import WorkerGroup
    from .rollout.phase import RolloutPhase, Validation
    from .rollout.scoring import Scorer
    from .rollout.servers import RolloutServers
    from .rollout.step_rollouts import StepRollouts
    from .training.checkpoints import RunCheckpoints, Stateful
    from .training.loop import LoopResult, TrainingLoop
    from .training.metrics import mismatch, rollout_metrics, throughput, update_metrics
    from .training.policy import PolicyConfig, policy_loss, with_loss_weights
    from .training.record import RunRecord
    from .training.supervised import supervised_step, train_supervised

__all__ = [
    "Algorithm",
    "Experience",
    "ExperienceBatch",
    "InputError",
    "Inputs",
    "Job",
    "JobConfig",
    "JobPlan",
    "LoopResult",
    "LossSpec",
    "MiniBatch",
    "ModelConfig",
    "ModelHandle",
    "Phase",
    "Placement",
    "PlacementError",
    "PolicyConfig",
    "PromptLike",
    "RankError",
    "RanksConfig",
    "RlRuntimeError",
    "RolloutFailed",
    "RolloutPhase",
    "RolloutServers",
    "RunCheckpoints",
    "RunRecord",
    "Scorer",
    "Session",
    "Stateful",
    "StepRollouts",
    "SupervisedConfig",
    "TaskSize",
    "TrainBatch",
    "TrainerConfig",
    "TrainingLoop",
    "Validation",
    "WorkerGroup",
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
    "run_concurrently",
    "run_job",
    "run_job_cli",
    "supervised_step",
    "throughput",
    "train_supervised",
    "update_metrics",
    "with_loss_weights",
]

_MODULES = {
    ".app.inputs": ("Inputs", "load_inputs"),
    ".app.job": ("Algorithm", "Job", "JobPlan", "check_job", "job_layout", "run_job"),
    ".app.job_config": ("JobConfig", "run_job_cli"),
    ".app.preflight": (
        "check_engine",
        "check_lengths",
        "check_prompt_files",
        "check_sequence_parallel",
        "check_servers",
        "check_supervised",
        "find_checkpoint",
    ),
    ".config": ("ModelConfig", "RanksConfig", "SupervisedConfig", "TaskSize", "TrainerConfig"),
    ".errors": ("InputError", "PlacementError", "RankError", "RlRuntimeError", "RolloutFailed"),
    ".experience": ("Experience", "ExperienceBatch", "Phase", "PromptLike"),
    ".launch.placement": ("Placement", "plan_placement"),
    ".launch.session": ("Session", "open_ranks", "open_session", "plan_ranks", "plan_session"),
    ".ranks.environment": ("prepare_driver",),
    ".ranks.loss_spec": ("LossSpec",),
    ".ranks.model_handle": ("ModelHandle", "run_concurrently"),
    ".ranks.train_batch": ("MiniBatch", "TrainBatch"),
    ".ranks.worker_group": ("WorkerGroup",),
    ".rollout.phase": ("RolloutPhase", "Validation"),
    ".rollout.scoring": ("Scorer",),
    ".rollout.servers": ("RolloutServers",),
    ".rollout.step_rollouts": ("StepRollouts",),
    ".training.checkpoints": ("RunCheckpoints", "Stateful"),
    ".training.loop": ("LoopResult", "TrainingLoop"),
    ".training.metrics": ("mismatch", "rollout_metrics", "throughput", "update_metrics"),
    ".training.policy": ("PolicyConfig", "policy_loss", "with_loss_weights"),
    ".training.record": ("RunRecord",),
    ".training.supervised": ("supervised_step", "train_supervised"),
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}

# Deprecated since 0.2.0: old name -> new name.
_RENAMED = {
    "RankGroup": "WorkerGroup",
    "Role": "ModelHandle",
    "together": "run_concurrently",
}


def __getattr__(name: str) -> Any:
    if name in run_kit.__all__:  # until 0.2.0 these were here
        warnings.warn(f"rl_runtime.{name} is deprecated: import run_kit.{name}", DeprecationWarning, stacklevel=2)
        return getattr(run_kit, name)
    if name in _RENAMED:
        new = _RENAMED[name]
        warnings.warn(f"rl_runtime.{name} is deprecated: use rl_runtime.{new}", DeprecationWarning, stacklevel=2)
        name = new
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
