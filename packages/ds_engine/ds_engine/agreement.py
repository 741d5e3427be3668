"""Agreement between ranks: compares their micro batches before a call and sums losses and metrics after it."""

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

_METHODS = (
    *("log_probs", "log_probs(adapters=False)", "next_tokens", "hidden_states"),
    *("train_mini_batch", "accumulate", "values"),
)


def agree_on_plan(method: str, micro_batches: Sequence[TokenBatch], device: torch.device, *, sp: int = 1) -> int:
    """Check that all ranks call `method` with matching micro batches, before a mismatch can hang.

    Args:
        sp: number of consecutive ranks that share each micro batch and must have the same ones.

    Returns:
        The number of micro batches without targets, over all replicas.

    Raises, on every rank:
        PlanMismatchError: ranks call different methods, have different numbers of micro batches, or have different
            micro batches where they must be the same.
        BatchError: there are no micro batches.
    """
    num_empty = sum(batch.target_ids_K.numel() == 0 for batch in micro_batches)
    content = _checksum(micro_batches) if sp > 1 else 0
    plan = [_METHODS.index(method), len(micro_batches), num_empty, content]
    plans = [plan]
    if dist.get_world_size() > 1:
        own = torch.tensor(plan, dtype=torch.int64, device=device)
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own)
        plans = [row.tolist() for row in gathered]
    methods = [_METHODS[plan[0]] for plan in plans]
    counts = [plan[1] for plan in plans]
    if len(set(methods)) > 1:
        raise PlanMismatchError(f"ranks call different methods: {dict(enumerate(methods))}")
    if len(set(counts)) > 1:
        raise PlanMismatchError(
            f"{method}: ranks have different numbers of micro batches: {dict(enumerate(counts))}; "
            "pass empty micro batches on ranks that have fewer"
        )
    if counts[0] == 0:
        raise BatchError(f"{method} needs at least one micro batch")
    for first in range(0, len(plans), sp):
        if len({plan[3] for plan in plans[first : first + sp]}) > 1:
            raise PlanMismatchError(
                f"{method}: ranks {first} to {first + sp - 1} have different micro batches",
                field="sequence_parallel",
                value=sp,
                allowed="the same micro batches on these ranks",
            )
    return sum(plan[2] for plan in plans[::sp])


def _checksum(micro_batches: Sequence[TokenBatch]) -> int:
    value = 0
    for batch in micro_batches:
        shared: list[Tensor] = []
        if (prefixes := getattr(batch, "prefixes", None)) is not None:
            shared = [prefixes.computed_U, prefixes.place_T, prefixes.cu_seqlens_N1, torch.tensor(prefixes.parents_N)]
        for tensor in (batch.input_ids_T, batch.cu_seqlens_S1, batch.target_index_K, batch.target_ids_K, *shared):
            value = crc32(tensor.cpu().numpy().tobytes(), value)
    return value


def sum_over_ranks(
    losses: Sequence[Tensor], metrics: Mapping[str, Sequence[Tensor]], num_skipped: int, *, sp: int = 1
) -> tuple[float, dict[str, float], int]:
    """Sum losses, metrics and a count over all micro batches and ranks; ranks may have different metrics.

    Args:
        sp: number of consecutive ranks that share each micro batch; only the first of them is counted.
    """
    own = (_sum(losses), {name: _sum(values) for name, values in metrics.items()}, num_skipped)
    gathered: list[Any] = [own]
    if dist.get_world_size() > 1:
        gathered *= dist.get_world_size()
        dist.all_gather_object(gathered, own)
    totals: dict[str, float] = {}
    gathered = gathered[::sp]
    for _, terms, _ in gathered:  # in rank order, so that every rank adds in the same order
        for name, value in terms.items():
            totals[name] = totals.get(name, 0.0) + value
    return math.fsum(loss for loss, _, _ in gathered), totals, sum(skipped for _, _, skipped in gathered)


def _sum(values: Sequence[Tensor]) -> float:
    """Sum of 0-d tensors in fp64, with one transfer from the device."""
    return float(torch.stack([value.double() for value in values]).sum()) if values else 0.0
