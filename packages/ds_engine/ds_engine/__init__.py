"""A ZeRO-1/2/3 training engine around DeepSpeed whose accumulated gradient is the one the maths asks for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batch import Head, LogProbFn, LossFn, LossOutput, StepStats, TokenBatch, TokenOutputs, ValueOutputs
    from .config import EngineConfig, LoraConfig, OffloadConfig, OptimConfig, ZeroConfig, learning_rate
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

_EXPORTS = {
    "BatchError": ".errors",
    "CheckpointError": ".errors",
    "CollectiveGuard": ".guard.collective_guard",
    "CollectiveMismatchError": ".errors",
    "EngineConfig": ".config",
    "EngineConfigError": ".errors",
    "EngineError": ".errors",
    "Head": ".batch",
    "LogProbFn": ".batch",
    "LoraConfig": ".config",
    "LossFn": ".batch",
    "LossOutput": ".batch",
    "MemoryEstimate": ".planning.memory_plan",
    "MemoryReport": ".zero.memory",
    "ModelError": ".errors",
    "OffloadConfig": ".config",
    "OptimConfig": ".config",
    "PlanMismatchError": ".errors",
    "RankStalledError": ".errors",
    "SimpleBatch": ".simple",
    "StateLayout": ".state.reshape",
    "StateSource": ".state.reshape",
    "StepStats": ".batch",
    "TokenBatch": ".batch",
    "TokenOutputs": ".batch",
    "ValueOutputs": ".batch",
    "ZeroConfig": ".config",
    "ZeroEngine": ".engine",
    "deepspeed_config": ".zero.ds_config",
    "dense_log_prob": ".simple",
    "estimate_memory": ".planning.memory_plan",
    "init_distributed": ".distributed",
    "learning_rate": ".config",
    "mark": ".guard.collective_guard",
    "memory_stats": ".zero.memory",
    "record_collectives": ".guard.collective_guard",
    "shutdown_distributed": ".distributed",
}

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


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
