"""RL post-training algorithms as pure functions of tensors: advantages, losses, KL, batch math and packing."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .advantages.gae import gae
    from .advantages.group import dr_grpo_advantages, group_advantages, remax_advantages, rloo_advantages
    from .advantages.reinforce_pp import reinforce_pp_advantages, reinforce_pp_baseline_advantages
    from .advantages.token_rewards import token_rewards
    from .advantages.whiten import masked_whiten
    from .batching.config import BatchConfig
    from .batching.dynamic_sampling import DynamicSelection, informative_groups, select_groups
    from .batching.layout import BatchLayout, batch_layout
    from .batching.ordering import inverse_order, reorder, restore
    from .batching.overlong import overlong_keep, overlong_penalty
    from .batching.packing import PackedBatch, SequenceData, pack, unpack, unpack_column
    from .batching.padded import flatten_padded, pad_flat
    from .batching.partition import balanced_partition
    from .batching.plan import MicroBatchPlan, plan_micro_batches, split_mini_batches
    from .batching.segments import broadcast_to_tokens, returns_to_go, segment_mean, segment_sum
    from .errors import BatchError, RLCoreError, ShapeError
    from .fused_log_prob import linear_log_prob
    from .importance.mismatch import effective_sample_size, mismatch_metrics
    from .importance.weights import ImportanceLevel, ImportanceMode, rollout_weights
    from .kl.control import AdaptiveKL, FixedKL, KLController
    from .kl.estimators import KLKind, kl_estimate, kl_loss
    from .losses.aggregate import LossAggregation, aggregate_loss, global_totals, token_weights
    from .losses.cispo import cispo_loss
    from .losses.entropy import entropy_bonus, entropy_from_logits
    from .losses.gspo import gspo_loss
    from .losses.policy import PolicyLossStats, policy_metric_shares, ppo_clip_loss
    from .losses.value import value_loss

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
    ".advantages.group": (
        "dr_grpo_advantages",
        "group_advantages",
        "remax_advantages",
        "rloo_advantages",
    ),
    ".losses.aggregate": (
        "LossAggregation",
        "aggregate_loss",
        "global_totals",
        "token_weights",
    ),
    ".batching.plan": (
        "MicroBatchPlan",
        "plan_micro_batches",
        "split_mini_batches",
    ),
    ".losses.cispo": ("cispo_loss",),
    ".batching.config": ("BatchConfig",),
    ".batching.dynamic_sampling": (
        "DynamicSelection",
        "informative_groups",
        "select_groups",
    ),
    ".losses.entropy": (
        "entropy_bonus",
        "entropy_from_logits",
    ),
    ".errors": (
        "BatchError",
        "RLCoreError",
        "ShapeError",
    ),
    ".advantages.gae": ("gae",),
    ".losses.gspo": ("gspo_loss",),
    ".importance.weights": (
        "ImportanceLevel",
        "ImportanceMode",
        "rollout_weights",
    ),
    ".kl.estimators": (
        "KLKind",
        "kl_estimate",
        "kl_loss",
    ),
    ".kl.control": (
        "AdaptiveKL",
        "FixedKL",
        "KLController",
    ),
    ".batching.layout": (
        "BatchLayout",
        "batch_layout",
    ),
    ".fused_log_prob": ("linear_log_prob",),
    ".importance.mismatch": (
        "effective_sample_size",
        "mismatch_metrics",
    ),
    ".batching.ordering": (
        "inverse_order",
        "reorder",
        "restore",
    ),
    ".batching.overlong": (
        "overlong_keep",
        "overlong_penalty",
    ),
    ".batching.packing": (
        "PackedBatch",
        "SequenceData",
        "pack",
        "unpack",
        "unpack_column",
    ),
    ".batching.padded": (
        "flatten_padded",
        "pad_flat",
    ),
    ".batching.partition": ("balanced_partition",),
    ".losses.policy": (
        "PolicyLossStats",
        "policy_metric_shares",
        "ppo_clip_loss",
    ),
    ".advantages.reinforce_pp": (
        "reinforce_pp_advantages",
        "reinforce_pp_baseline_advantages",
    ),
    ".advantages.token_rewards": ("token_rewards",),
    ".batching.segments": (
        "broadcast_to_tokens",
        "returns_to_go",
        "segment_mean",
        "segment_sum",
    ),
    ".losses.value": ("value_loss",),
    ".advantages.whiten": ("masked_whiten",),
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
