"""Exports full tensors from any ZeRO stage, in gathers of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..model.lora import NamedTensor

_GATHER_BYTES = 256 * 1024 * 1024


def export_tensors(
    tensors: Sequence[NamedTensor], *, rank: int, zero_stage: int, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) for each of `tensors`, in order, on rank 0; yield nothing on other ranks.

    Every rank must iterate to the end: at stage 3 the iteration issues collectives. At stages 1 and 2 the tensors may
    share memory with the model (do not write to them); at stage 3 they are copies.
    """
    if zero_stage < 3:
        if rank == 0:
            for tensor in tensors:
                yield tensor.name, tensor.value(dtype)
        return
    import deepspeed

    for batch in _batches(tensors):
        with deepspeed.zero.GatheredParameters([part for tensor in batch for part in tensor.parts]):
            # Views are invalid after the context, so copies are made inside it.
            copies = [(tensor.name, tensor.value(dtype, copy=True)) for tensor in batch if rank == 0]
        yield from copies


def _batches(tensors: Sequence[NamedTensor]) -> Iterator[list[NamedTensor]]:
    """Groups of bounded size; parts of one parameter, which follow one another, share a group and its gather."""
    batch: list[NamedTensor] = []
    num_bytes = 0
    for tensor in tensors:
        if batch and tensor.parameter is batch[-1].parameter:
            batch.append(tensor)
            continue
        if batch and num_bytes + tensor.num_bytes > _GATHER_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(tensor)
        num_bytes += tensor.num_bytes
    if batch:
        yield batch
