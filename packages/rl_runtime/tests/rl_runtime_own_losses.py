"""Losses of users for tests, named as `rl_runtime_own_losses:…`."""

from typing import Any

from torch import Tensor

from rl_core import Batch


def reinforce(log_probs_K: Tensor, batch: Batch, *, scale: float = 1.0) -> Tensor:
    """-scale * advantage * log-prob."""
    return -scale * batch.columns["advantages"] * log_probs_K


def summed(log_probs_K: Tensor, batch: Batch) -> Tensor:
    """Wrong: one number instead of one per token."""
    return (batch.columns["advantages"] * log_probs_K).sum()


def detached(log_probs_K: Tensor, batch: Batch) -> Tensor:
    """Wrong: no gradient."""
    return log_probs_K.detach()


def infinite(log_probs_K: Tensor, batch: Batch) -> Tensor:
    """Wrong: not finite."""
    return log_probs_K * float("inf")


def raising(log_probs_K: Tensor, batch: Batch) -> Any:
    """Wrong: reads a column that does not exist."""
    return batch.columns["rewards"]


def textual(log_probs_K: Tensor, batch: Batch) -> Any:
    """Wrong: no tensor."""
    return "0.5"
