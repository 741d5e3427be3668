"""Full tensors out of any ZeRO stage, one bounded gather at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..model.nf4 import Nf4Packing

__all__ = ["LowRank", "NamedTensor", "export_tensors"]

_GATHER_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """What an adapter adds to a frozen weight: scale * B @ A."""

    a_RI: nn.Parameter
    """[rank, in]"""
    b_OR: nn.Parameter
    """[out, rank]"""
    scale: float

    @property
    def parts(self) -> list[nn.Parameter]:
        """Everything that has to be whole when `merged` is called, besides the weight."""
        return [self.a_RI, self.b_OR]

    def merged(self, weight_OI: Tensor) -> Tensor:
        """weight + scale * B @ A in fp32; all three whole, that is gathered at stage 3."""
        return torch.addmm(weight_OI.float(), self.b_OR.float(), self.a_RI.float(), alpha=self.scale)


@dataclass(frozen=True, kw_only=True)
class NamedTensor:
    """A tensor to be handed out, and the parameters it is made of."""

    name: str
    parameter: nn.Parameter
    low_rank: LowRank | None = None
    packed: Nf4Packing | None = None
    """Set where the parameter is packed: what it is unpacked."""

    @property
    def parts(self) -> list[nn.Parameter]:
        """Everything that has to be whole when `value` is called."""
        return [self.parameter, *(self.low_rank.parts if self.low_rank else [])]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole parts, and of what they are unpacked to."""
        unpacked = self.packed.numel * self.packed.dtype.itemsize if self.packed else 0
        return unpacked + sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in self.parts)

    @torch.no_grad()
    def value(self, dtype: torch.dtype | None = None, *, copy: bool = False) -> Tensor:
        """The tensor in its own dtype or `dtype`; the parameter's own memory where nothing asks for other."""
        weight = self.parameter.detach()
        if self.packed is not None:
            weight, copy = self.packed.unpack(weight), False
        if self.low_rank is not None:
            return self.low_rank.merged(weight).to(dtype or weight.dtype)
        return weight.to(dtype or weight.dtype, copy=copy)


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
