"""RL post-training algorithms as pure functions of tensors: advantages, losses, KL, batch math and packing."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .advantages import dr_grpo_advantages, group_advantages, remax_advantages, rloo_advantages
    from .aggregate import LossAggregation, aggregate_loss, global_totals, token_weights
    from .batch_math import MicroBatchPlan, plan_micro_batches, split_mini_batches
    from .config import BatchConfig
    from .errors import BatchError, RLCoreError, ShapeError
    from .kl import KLKind, kl_estimate, kl_loss
    from .linear_log_prob import linear_log_prob
    from .mismatch import effective_sample_size, mismatch_metrics
    from .packing import PackedBatch, SequenceData, pack, unpack, unpack_column
    from .policy_loss import PolicyLossStats, policy_metric_shares, ppo_clip_loss
    from .segments import broadcast_to_tokens, returns_to_go, segment_mean, segment_sum

__all__ = [
    "BatchConfig",
    "BatchError",
    "KLKind",
    "LossAggregation",
    "MicroBatchPlan",
    "PackedBatch",
    "PolicyLossStats",
    "RLCoreError",
    "SequenceData",
    "ShapeError",
    "aggregate_loss",
    "broadcast_to_tokens",
    "dr_grpo_advantages",
    "effective_sample_size",
    "global_totals",
    "group_advantages",
    "kl_estimate",
    "kl_loss",
    "linear_log_prob",
    "mismatch_metrics",
    "pack",
    "plan_micro_batches",
    "policy_metric_shares",
    "ppo_clip_loss",
    "remax_advantages",
    "returns_to_go",
    "rloo_advantages",
    "segment_mean",
    "segment_sum",
    "split_mini_batches",
    "token_weights",
    "unpack",
    "unpack_column",
]

_MODULES = {
    ".advantages": ("dr_grpo_advantages", "group_advantages", "remax_advantages", "rloo_advantages"),
    ".aggregate": ("LossAggregation", "aggregate_loss", "global_totals", "token_weights"),
    ".batch_math": ("MicroBatchPlan", "plan_micro_batches", "split_mini_batches"),
    ".config": ("BatchConfig",),
    ".errors": ("BatchError", "RLCoreError", "ShapeError"),
    ".kl": ("KLKind", "kl_estimate", "kl_loss"),
    ".linear_log_prob": ("linear_log_prob",),
    ".mismatch": ("effective_sample_size", "mismatch_metrics"),
    ".packing": ("PackedBatch", "SequenceData", "pack", "unpack", "unpack_column"),
    ".policy_loss": ("PolicyLossStats", "policy_metric_shares", "ppo_clip_loss"),
    ".segments": ("broadcast_to_tokens", "returns_to_go", "segment_mean", "segment_sum"),
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)


class _Package(ModuleType):
    """Importing a submodule binds it on its package; a function of the same name must win over that."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _EXPORTS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
