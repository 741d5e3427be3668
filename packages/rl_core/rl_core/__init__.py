"""RL post-training algorithms as pure functions of tensors: advantages, losses, KL, batch math and packing."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .advantages.gae import gae, token_rewards
    from .advantages.group import dr_grpo_advantages, group_advantages, remax_advantages, rloo_advantages
    from .advantages.reinforce_pp import reinforce_pp_advantages, reinforce_pp_baseline_advantages
    from .advantages.whiten import masked_whiten
    from .batching.dapo import DynamicSelection, informative_groups, overlong_keep, overlong_penalty, select_groups
    from .batching.layout import BatchConfig, BatchLayout, batch_layout
    from .batching.ordering import inverse_order, reorder, restore
    from .batching.packing import PackedBatch, SequenceData, pack, unpack, unpack_column
    from .batching.plan import MicroBatchPlan, balanced_partition, plan_micro_batches, split_mini_batches
    from .batching.segments import (
        broadcast_to_tokens,
        flatten_padded,
        pad_flat,
        returns_to_go,
        segment_mean,
        segment_sum,
    )
    from .errors import BatchError, RLCoreError, ShapeError
    from .fused_log_prob import linear_log_prob
    from .importance.mismatch import effective_sample_size, mismatch_metrics
    from .importance.weights import rollout_weights
    from .kl.control import AdaptiveKL, FixedKL, KLController
    from .kl.estimators import kl_estimate, kl_loss
    from .losses.aggregate import aggregate_loss, global_totals, token_weights
    from .losses.policy import (
        PolicyLossStats,
        cispo_loss,
        entropy_bonus,
        entropy_from_logits,
        gspo_loss,
        policy_metric_shares,
        ppo_clip_loss,
    )
    from .losses.value import value_loss
    from .options import ImportanceLevel, ImportanceMode, KLKind, LossAggregation, check_clip

__all__ = [
    "AdaptiveKL",
    "BatchConfig",
    "BatchError",
    "BatchLayout",
    "DynamicSelection",
    "FixedKL",
    "ImportanceLevel",
    "ImportanceMode",
    "KLController",
    "KLKind",
    "LossAggregation",
    "MicroBatchPlan",
    "PackedBatch",
    "PolicyLossStats",
    "RLCoreError",
    "SequenceData",
    "ShapeError",
    "aggregate_loss",
    "balanced_partition",
    "batch_layout",
    "broadcast_to_tokens",
    "check_clip",
    "cispo_loss",
    "dr_grpo_advantages",
    "effective_sample_size",
    "entropy_bonus",
    "entropy_from_logits",
    "flatten_padded",
    "gae",
    "global_totals",
    "group_advantages",
    "gspo_loss",
    "informative_groups",
    "inverse_order",
    "kl_estimate",
    "kl_loss",
    "linear_log_prob",
    "masked_whiten",
    "mismatch_metrics",
    "overlong_keep",
    "overlong_penalty",
    "pack",
    "pad_flat",
    "plan_micro_batches",
    "policy_metric_shares",
    "ppo_clip_loss",
    "reinforce_pp_advantages",
    "reinforce_pp_baseline_advantages",
    "remax_advantages",
    "reorder",
    "restore",
    "returns_to_go",
    "rloo_advantages",
    "rollout_weights",
    "segment_mean",
    "segment_sum",
    "select_groups",
    "split_mini_batches",
    "token_rewards",
    "token_weights",
    "unpack",
    "unpack_column",
    "value_loss",
]

_MODULES = {
    ".advantages.gae": ("gae", "token_rewards"),
    ".advantages.group": ("dr_grpo_advantages", "group_advantages", "remax_advantages", "rloo_advantages"),
    ".advantages.reinforce_pp": ("reinforce_pp_advantages", "reinforce_pp_baseline_advantages"),
    ".advantages.whiten": ("masked_whiten",),
    ".batching.dapo": ("DynamicSelection", "informative_groups", "overlong_keep", "overlong_penalty", "select_groups"),
    ".batching.layout": ("BatchConfig", "BatchLayout", "batch_layout"),
    ".batching.ordering": ("inverse_order", "reorder", "restore"),
    ".batching.packing": ("PackedBatch", "SequenceData", "pack", "unpack", "unpack_column"),
    ".batching.plan": ("MicroBatchPlan", "balanced_partition", "plan_micro_batches", "split_mini_batches"),
    ".batching.segments": (
        "broadcast_to_tokens",
        "flatten_padded",
        "pad_flat",
        "returns_to_go",
        "segment_mean",
        "segment_sum",
    ),
    ".errors": ("BatchError", "RLCoreError", "ShapeError"),
    ".fused_log_prob": ("linear_log_prob",),
    ".importance.mismatch": ("effective_sample_size", "mismatch_metrics"),
    ".importance.weights": ("rollout_weights",),
    ".kl.control": ("AdaptiveKL", "FixedKL", "KLController"),
    ".kl.estimators": ("kl_estimate", "kl_loss"),
    ".losses.aggregate": ("aggregate_loss", "global_totals", "token_weights"),
    ".losses.policy": (
        "PolicyLossStats",
        "cispo_loss",
        "entropy_bonus",
        "entropy_from_logits",
        "gspo_loss",
        "policy_metric_shares",
        "ppo_clip_loss",
    ),
    ".losses.value": ("value_loss",),
    ".options": ("ImportanceLevel", "ImportanceMode", "KLKind", "LossAggregation", "check_clip"),
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
