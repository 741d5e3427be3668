"""What ranks tell each other besides gradients: the plan before a call, the sums after it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from .batch import TokenBatch
from .errors import BatchError, PlanMismatchError

__all__ = ["agree_on_plan", "sum_over_ranks"]

_METHODS = ("log_probs", "log_probs(adapters=False)", "train_mini_batch", "values")


def agree_on_plan(method: str, micro_batches: Sequence[TokenBatch], device: torch.device, *, sp: int = 1) -> int:
    """Compare plans before anything can hang; returns the number of micro batches without targets, over all replicas.

    Args:
        sp: consecutive ranks that compute each micro batch together, and so have to bring the same ones.

    Raises, on every rank:
        PlanMismatchError: ranks call different methods, brought different numbers of micro batches, or different micro
            batches where they have to be the same.
        BatchError: there is no micro batch.
    """
    num_empty = sum(batch.target_ids_K.numel() == 0 for batch in micro_batches)
    content = _checksum(micro_batches) if sp > 1 else 0
    plan = [_METHODS.index(method), len(micro_batches), num_empty, content]
    plans = [plan]
    if dist.get_world_size() > 1:
        mine = torch.tensor(plan, dtype=torch.int64, device=device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        plans = [row.tolist() for row in everyone]
    methods = [_METHODS[plan[0]] for plan in plans]
    counts = [plan[1] for plan in plans]
    if len(set(methods)) > 1:
        raise PlanMismatchError(f"ranks call different methods: {dict(enumerate(methods))}")
    if len(set(counts)) > 1:
        raise PlanMismatchError(
            f"{method}: ranks brought different numbers of micro batches: {dict(enumerate(counts))}; "
            "give ranks without work empty micro batches"
        )
    if counts[0] == 0:
        raise BatchError(f"{method} needs at least one micro batch")
    for first in range(0, len(plans), sp):
        if len({plan[3] for plan in plans[first : first + sp]}) > 1:
            raise PlanMismatchError(
                f"{method}: ranks {first} to {first + sp - 1} brought different micro batches; with "
                f"sequence_parallel={sp} they compute the same ones together"
            )
    return sum(plan[2] for plan in plans[::sp])


def _checksum(micro_batches: Sequence[TokenBatch]) -> int:
    value = 0
    for batch in micro_batches:
        for tensor in (batch.input_ids_T, batch.cu_seqlens_S1, batch.target_index_K, batch.target_ids_K):
            value = crc32(tensor.cpu().numpy().tobytes(), value)
    return value


def sum_over_ranks(
    losses: Sequence[Tensor], metrics: Mapping[str, Sequence[Tensor]], *, sp: int = 1
) -> tuple[float, dict[str, float]]:
    """Total loss and metrics of all micro batches and ranks; ranks may bring different metrics.

    Of sp consecutive ranks, which compute the same micro batches, the first counts.
    """
    mine = (_sum(losses), {name: _sum(values) for name, values in metrics.items()})
    everyone: list[Any] = [mine]
    if dist.get_world_size() > 1:
        everyone *= dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    totals: dict[str, float] = {}
    everyone = everyone[::sp]
    for _, shares in everyone:  # in rank order, so every rank adds in the same order
        for name, value in shares.items():
            totals[name] = totals.get(name, 0.0) + value
    return math.fsum(loss for loss, _ in everyone), totals


def _sum(values: Sequence[Tensor]) -> float:
    """Sum of 0-d tensors in fp64, one transfer from the device."""
    return float(torch.stack([value.double() for value in values]).sum()) if values else 0.0
