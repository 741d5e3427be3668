"""Full parameters out of any ZeRO stage, one bounded gather at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

__all__ = ["export_parameters"]

_GATHER_BYTES = 256 * 1024 * 1024


def export_parameters(
    module: nn.Module, *, rank: int, zero_stage: int, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every parameter in the module's order, on rank 0; nothing on other ranks.

    Tied parameters appear once, under their first name. Tensors are the model's own at stages 1 and 2 (do not write to
    them; with `dtype`, converted copies) and copies at stage 3. Every rank must iterate to the end: at stage 3 each
    step is a collective.
    """
    named = list(module.named_parameters())
    if zero_stage < 3:
        if rank == 0:
            for name, parameter in named:
                yield name, parameter.detach().to(dtype or parameter.dtype)
        return
    import deepspeed

    for bunch in _bunches(named):
        with deepspeed.zero.GatheredParameters([parameter for _, parameter in bunch]):
            # Views die with the context, so copies are taken inside it.
            copies = [
                (name, parameter.detach().to(dtype or parameter.dtype, copy=True))
                for name, parameter in bunch
                if rank == 0
            ]
        yield from copies


def _bunches(named: list[tuple[str, nn.Parameter]]) -> Iterator[list[tuple[str, nn.Parameter]]]:
    bunch: list[tuple[str, nn.Parameter]] = []
    num_bytes = 0
    for name, parameter in named:
        size = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        if bunch and num_bytes + size > _GATHER_BYTES:
            yield bunch
            bunch, num_bytes = [], 0
        bunch.append((name, parameter))
        num_bytes += size
    if bunch:
        yield bunch
