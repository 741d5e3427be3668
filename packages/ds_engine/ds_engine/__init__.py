"""A DeepSpeed ZeRO-1/2/3 training engine with exact gradient accumulation on packed sequences."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batch import Head, LogProbFn, LossFn, LossOutput, StepStats, TokenBatch, TokenOutputs, ValueOutputs
    from .config import EngineConfig, LoraConfig, OffloadConfig, OptimConfig, ZeroConfig, check_schedule, learning_rate
    from .distributed import init_distributed, shutdown_distributed
    from .engine import ZeroEngine
    from .errors import (
        BatchError,
        CheckpointError,
        CollectiveMismatchError,
        EngineConfigError,
        EngineError,
        ModelError,
        PlanMismatchError,
        RankStalledError,
    )
    from .guard.collective_guard import CollectiveGuard, mark, record_collectives
    from .planning.memory_plan import MemoryEstimate, estimate_memory
    from .simple import SimpleBatch, dense_log_prob
    from .state.reshape import StateLayout, StateSource
    from .zero.ds_config import deepspeed_config
    from .zero.memory import MemoryReport, memory_stats

__all__ = [
    "BatchError",
    "CheckpointError",
    "CollectiveGuard",
    "CollectiveMismatchError",
    "EngineConfig",
    "EngineConfigError",
    "EngineError",
    "Head",
    "LogProbFn",
    "LoraConfig",
    "LossFn",
    "LossOutput",
    "MemoryEstimate",
    "MemoryReport",
    "ModelError",
    "OffloadConfig",
    "OptimConfig",
    "PlanMismatchError",
    "RankStalledError",
    "SimpleBatch",
    "StateLayout",
    "StateSource",
    "StepStats",
    "TokenBatch",
    "TokenOutputs",
    "ValueOutputs",
    "ZeroConfig",
    "ZeroEngine",
    "check_schedule",
    "deepspeed_config",
    "dense_log_prob",
    "estimate_memory",
    "init_distributed",
    "learning_rate",
    "mark",
    "memory_stats",
    "record_collectives",
    "shutdown_distributed",
]


_MODULES = {
    ".batch": ("Head", "LogProbFn", "LossFn", "LossOutput", "StepStats", "TokenBatch", "TokenOutputs", "ValueOutputs"),
    ".config": (
        "EngineConfig",
        "LoraConfig",
        "OffloadConfig",
        "OptimConfig",
        "ZeroConfig",
        "check_schedule",
        "learning_rate",
    ),
    ".distributed": ("init_distributed", "shutdown_distributed"),
    ".engine": ("ZeroEngine",),
    ".errors": (
        "BatchError",
        "CheckpointError",
        "CollectiveMismatchError",
        "EngineConfigError",
        "EngineError",
        "ModelError",
        "PlanMismatchError",
        "RankStalledError",
    ),
    ".guard.collective_guard": ("CollectiveGuard", "mark", "record_collectives"),
    ".planning.memory_plan": ("MemoryEstimate", "estimate_memory"),
    ".simple": ("SimpleBatch", "dense_log_prob"),
    ".state.reshape": ("StateLayout", "StateSource"),
    ".zero.ds_config": ("deepspeed_config",),
    ".zero.memory": ("MemoryReport", "memory_stats"),
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
