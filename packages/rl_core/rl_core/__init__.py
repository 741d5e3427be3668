"""RL post-training algorithms as pure functions of tensors: advantages, losses, KL, batch math and packing."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .advantages import dr_grpo_advantages, group_advantages, remax_advantages, rloo_advantages
    from .aggregate import LossAggregation, aggregate_loss, global_totals, token_weights
    from .batch_math import MicroBatchPlan, plan_micro_batches, split_mini_batches
    from .cispo import cispo_loss
    from .config import BatchConfig
    from .dynamic_sampling import DynamicSelection, informative_groups, select_groups
    from .entropy import entropy_bonus, entropy_from_logits
    from .errors import BatchError, RLCoreError, ShapeError
    from .fused_log_prob import linear_log_prob
    from .gae_advantages import gae
    from .gspo import gspo_loss
    from .importance import ImportanceLevel, ImportanceMode, rollout_weights
    from .kl import KLKind, kl_estimate, kl_loss
    from .kl_control import AdaptiveKL, FixedKL, KLController
    from .layout import BatchLayout, batch_layout
    from .mismatch import effective_sample_size, mismatch_metrics
    from .ordering import inverse_order, reorder, restore
    from .overlong import overlong_keep, overlong_penalty
    from .packing import PackedBatch, SequenceData, pack, unpack, unpack_column
    from .padded import flatten_padded, pad_flat
    from .partition import balanced_partition
    from .policy_loss import PolicyLossStats, policy_metric_shares, ppo_clip_loss
    from .reinforce_pp import reinforce_pp_advantages, reinforce_pp_baseline_advantages
    from .rewards import token_rewards
    from .segments import broadcast_to_tokens, returns_to_go, segment_mean, segment_sum
    from .value import value_loss
    from .whiten import masked_whiten

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
    ".advantages": (
        "dr_grpo_advantages",
        "group_advantages",
        "remax_advantages",
        "rloo_advantages",
    ),
    ".aggregate": (
        "LossAggregation",
        "aggregate_loss",
        "global_totals",
        "token_weights",
    ),
    ".batch_math": (
        "MicroBatchPlan",
        "plan_micro_batches",
        "split_mini_batches",
    ),
    ".cispo": ("cispo_loss",),
    ".config": ("BatchConfig",),
    ".dynamic_sampling": (
        "DynamicSelection",
        "informative_groups",
        "select_groups",
    ),
    ".entropy": (
        "entropy_bonus",
        "entropy_from_logits",
    ),
    ".errors": (
        "BatchError",
        "RLCoreError",
        "ShapeError",
    ),
    ".gae_advantages": ("gae",),
    ".gspo": ("gspo_loss",),
    ".importance": (
        "ImportanceLevel",
        "ImportanceMode",
        "rollout_weights",
    ),
    ".kl": (
        "KLKind",
        "kl_estimate",
        "kl_loss",
    ),
    ".kl_control": (
        "AdaptiveKL",
        "FixedKL",
        "KLController",
    ),
    ".layout": (
        "BatchLayout",
        "batch_layout",
    ),
    ".fused_log_prob": ("linear_log_prob",),
    ".mismatch": (
        "effective_sample_size",
        "mismatch_metrics",
    ),
    ".ordering": (
        "inverse_order",
        "reorder",
        "restore",
    ),
    ".overlong": (
        "overlong_keep",
        "overlong_penalty",
    ),
    ".packing": (
        "PackedBatch",
        "SequenceData",
        "pack",
        "unpack",
        "unpack_column",
    ),
    ".padded": (
        "flatten_padded",
        "pad_flat",
    ),
    ".partition": ("balanced_partition",),
    ".policy_loss": (
        "PolicyLossStats",
        "policy_metric_shares",
        "ppo_clip_loss",
    ),
    ".reinforce_pp": (
        "reinforce_pp_advantages",
        "reinforce_pp_baseline_advantages",
    ),
    ".rewards": ("token_rewards",),
    ".segments": (
        "broadcast_to_tokens",
        "returns_to_go",
        "segment_mean",
        "segment_sum",
    ),
    ".value": ("value_loss",),
    ".whiten": ("masked_whiten",),
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
