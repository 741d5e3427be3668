"""Full tensors out of any ZeRO stage, one bounded gather at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..model.lora import NamedTensor

__all__ = ["export_tensors"]

_GATHER_BYTES = 256 * 1024 * 1024


def export_tensors(
    tensors: Sequence[NamedTensor], *, rank: int, zero_stage: int, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of each of `tensors` in order, on rank 0; nothing on other ranks.

    They are the model's own at stages 1 and 2 (do not write to them) unless a cast or an adapter makes them new ones,
    and copies at stage 3. Every rank must iterate to the end: at stage 3 each step is a collective.
    """
    if zero_stage < 3:
        if rank == 0:
            for tensor in tensors:
                yield tensor.name, tensor.value(dtype)
        return
    import deepspeed

    for bunch in _bunches(tensors):
        with deepspeed.zero.GatheredParameters([part for tensor in bunch for part in tensor.parts]):
            # Views die with the context, so copies are taken inside it.
            copies = [(tensor.name, tensor.value(dtype, copy=True)) for tensor in bunch if rank == 0]
        yield from copies


def _bunches(tensors: Sequence[NamedTensor]) -> Iterator[list[NamedTensor]]:
    bunch: list[NamedTensor] = []
    num_bytes = 0
    for tensor in tensors:
        if bunch and num_bytes + tensor.num_bytes > _GATHER_BYTES:
            yield bunch
            bunch, num_bytes = [], 0
        bunch.append(tensor)
        num_bytes += tensor.num_bytes
    if bunch:
        yield bunch
