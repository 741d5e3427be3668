"""A ZeRO-1/2/3 training engine around DeepSpeed whose accumulated gradient is the one the maths asks for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batch import Head, LogProbFn, LossFn, LossOutput, StepStats, TokenBatch, TokenOutputs, ValueOutputs
    from .collective_guard import CollectiveGuard, mark, record_collectives
    from .config import EngineConfig, LoraConfig, OffloadConfig, OptimConfig, ZeroConfig
    from .distributed import init_distributed, shutdown_distributed
    from .ds_config import deepspeed_config
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
    from .memory import MemoryReport, memory_stats
    from .memory_plan import MemoryEstimate, estimate_memory
    from .reshape import StateLayout, StateSource
    from .schedule import learning_rate
    from .simple import SimpleBatch, dense_log_prob

_EXPORTS = {
    "BatchError": ".errors",
    "CheckpointError": ".errors",
    "CollectiveGuard": ".collective_guard",
    "CollectiveMismatchError": ".errors",
    "EngineConfig": ".config",
    "EngineConfigError": ".errors",
    "EngineError": ".errors",
    "Head": ".batch",
    "LogProbFn": ".batch",
    "LoraConfig": ".config",
    "LossFn": ".batch",
    "LossOutput": ".batch",
    "MemoryEstimate": ".memory_plan",
    "MemoryReport": ".memory",
    "ModelError": ".errors",
    "OffloadConfig": ".config",
    "OptimConfig": ".config",
    "PlanMismatchError": ".errors",
    "RankStalledError": ".errors",
    "SimpleBatch": ".simple",
    "StateLayout": ".reshape",
    "StateSource": ".reshape",
    "StepStats": ".batch",
    "TokenBatch": ".batch",
    "TokenOutputs": ".batch",
    "ValueOutputs": ".batch",
    "ZeroConfig": ".config",
    "ZeroEngine": ".engine",
    "deepspeed_config": ".ds_config",
    "dense_log_prob": ".simple",
    "estimate_memory": ".memory_plan",
    "init_distributed": ".distributed",
    "learning_rate": ".schedule",
    "mark": ".collective_guard",
    "memory_stats": ".memory",
    "record_collectives": ".collective_guard",
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
