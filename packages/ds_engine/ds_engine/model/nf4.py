"""NF4, four bits a weight: QLoRA's format (Dettmers et al. 2023, arXiv 2305.14314), as bitsandbytes computes it.

A weight is flattened into blocks of 64. Of each block the largest magnitude m is kept in fp32, and of each weight w the
index of the value v nearest to w / m among sixteen, which are quantiles of a normal distribution scaled to [-1, 1]:

    w' = m v,   |w' - w| <= m * 0.1519   (half the widest gap between two values)

In memory, one after another: numel / 2 bytes of indices, two a byte with the first in the high bits, and 4 bytes m a
block, so 4.5 bits a weight. Plain torch, so it runs wherever torch does. Indices, scales and unpacked weights are those
of bitsandbytes.functional.quantize_4bit and dequantize_4bit on the CPU to the last bit, which a test shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..planning.model_shape import NF4_BLOCK, UNPACKED_AT_ONCE, nf4_bytes
from .parts import linear_layers

__all__ = ["VALUES", "Nf4Linear", "Nf4Packing", "nf4_packings", "quantize_base"]

VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""What an index stands for, times the block's scale."""


@dataclass(frozen=True, kw_only=True)
class Nf4Packing:
    """What a packed weight is when unpacked.

    Packed it is a flat tensor whose bytes are as above and whose dtype is a label: it says `dtype` too, so that what
    handles a model by its dtype (DeepSpeed's sharding and gathering, which only copies) treats it like the rest.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    """That of the weight before, and of what is unpacked."""

    def __post_init__(self) -> None:
        nf4_bytes(self.numel)  # refuses what it cannot hold

    @property
    def numel(self) -> int:
        """Weights."""
        return math.prod(self.shape)

    @torch.no_grad()
    def pack(self, weight: Tensor) -> Tensor:
        """`weight`, of this shape, as [nf4_bytes / size of dtype] in `dtype`, on its device.

        Raises:
            ValueError: a weight is infinite or not a number.
        """
        flat = weight.detach().reshape(-1)
        out = torch.empty(nf4_bytes(self.numel), dtype=torch.uint8, device=flat.device)
        indices, scales = self._parts(out)
        bounds = _bounds(flat.device)
        for start in range(0, self.numel, UNPACKED_AT_ONCE):
            blocks = flat[start : start + UNPACKED_AT_ONCE].float().view(-1, NF4_BLOCK)
            largest = blocks.abs().amax(dim=1)
            scales[start // NF4_BLOCK : start // NF4_BLOCK + len(blocks)] = largest
            # Of a block of zeros any index is right.
            scaled = (blocks * (1.0 / largest.clamp(min=1e-38))[:, None]).clamp_(-1, 1)
            index = torch.bucketize(scaled.view(-1), bounds, out_int32=True).to(torch.uint8)
            indices[start // 2 : (start + len(index)) // 2] = (index[::2] << 4) | index[1::2]
        if not scales.isfinite().all():
            raise ValueError("it holds weights that are infinite or not a number")
        return out.view(self.dtype)

    @torch.no_grad()
    def unpack(self, packed: Tensor) -> Tensor:
        """The weight, of this shape and dtype, that `pack` made `packed` of."""
        indices, scales = self._parts(packed.detach().view(torch.uint8))
        pairs = _pairs(packed.device)
        out = torch.empty(self.numel, dtype=self.dtype, device=packed.device)
        for start in range(0, self.numel, UNPACKED_AT_ONCE):
            stop = min(start + UNPACKED_AT_ONCE, self.numel)
            values = pairs.index_select(0, indices[start // 2 : stop // 2].int()).view(-1, NF4_BLOCK)
            scale = scales[start // NF4_BLOCK : stop // NF4_BLOCK, None]
            torch.mul(values, scale, out=values)
            out[start:stop].view(-1, NF4_BLOCK).copy_(values)
        return out.view(self.shape)

    def _parts(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """(indices [numel / 2] uint8, scales [numel / NF4_BLOCK] fp32) of the bytes `packed`."""
        scales = packed[self.numel // 2 :]
        # What DeepSpeed has gathered lies where it comes to lie in a bucket.
        aligned = scales.storage_offset() % 4 == 0
        return packed[: self.numel // 2], (scales if aligned else scales.clone()).view(torch.float32)


def _values(device: torch.device) -> Tensor:
    return torch.tensor(VALUES, dtype=torch.float32, device=device)


@cache
def _bounds(device: torch.device) -> Tensor:
    """[15], half way between two values each."""
    values = _values(device)
    return (values[1:] + values[:-1]) / 2


@cache
def _pairs(device: torch.device) -> Tensor:
    """[256, 2]: both weights of a byte of indices, unscaled."""
    byte = torch.arange(256, device=device)
    return _values(device)[torch.stack((byte >> 4, byte & 15), dim=1)]


class Nf4Linear(nn.Linear):
    """y = x W' + b with W' unpacked for the call; a linear layer to PEFT."""

    def __init__(self, linear: nn.Linear, weight_M: nn.Parameter, packed: Nf4Packing) -> None:
        """In place of `linear`, whose weight is `packed` in `weight_M` (as `Nf4Packing.pack` gives it)."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = packed
        self.weight = weight_M
        self.bias = linear.bias
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] to [..., out], in the input's dtype, which is that of the model."""
        return cast("Tensor", _Product.apply(input, self.weight, self.bias, self.packed))


class _Product(torch.autograd.Function):
    """Autograd's own product would keep the unpacked weight from the forward to the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_M: Tensor, bias: Tensor | None, packed: Nf4Packing) -> Tensor:
        ctx.save_for_backward(weight_M)
        ctx.packed = packed
        return nn.functional.linear(x, packed.unpack(weight_M), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None, None]:
        (weight_M,) = ctx.saved_tensors
        return grads[0] @ ctx.packed.unpack(weight_M), None, None, None


def quantize_base(model: Any, *, device: torch.device) -> None:
    """Put every linear layer of the backbone into NF4, in place, one after another; embeddings and head stay.

    A layer's own memory is free before the next is begun. Weights that ZeRO-3 has sharded are gathered and sharded
    again, so every rank calls this. Every rank computes the same bits.

    Args:
        device: where layers are packed and stay; those that ZeRO-3 has sharded are where it keeps them.

    Raises:
        ModelError: the backbone has no linear layer, or one whose weights are no whole blocks of 64 or not finite.
    """
    layers = linear_layers(model, nn.Linear)
    if not layers:
        raise ModelError(f"{type(model).__name__} has no linear layer in its backbone to put into NF4")
    for name in list(layers):
        linear = layers.pop(name)
        try:
            model.set_submodule(name, _packed(linear, device))
        except ValueError as error:
            raise ModelError(
                f"lora.base_format='nf4' cannot pack {name}.weight: {error}. Use base_format='plain'"
            ) from None


def _packed(linear: nn.Linear, device: torch.device) -> Nf4Linear:
    old: Any = linear.weight
    packed = Nf4Packing(shape=tuple(getattr(old, "ds_shape", old.shape)), dtype=old.dtype)
    if not hasattr(old, "ds_id"):
        return Nf4Linear(linear, nn.Parameter(packed.pack(old.to(device)), requires_grad=False), packed)
    import deepspeed

    with deepspeed.zero.GatheredParameters([old]):
        weight_M = nn.Parameter(packed.pack(old), requires_grad=False)
    old.convert_to_zero_parameters(param_list=[weight_M])
    old.ds_tensor = None  # DeepSpeed's closures hold the parameter in a circle; its shard need not wait for that
    return Nf4Linear(linear, weight_M, packed)


def nf4_packings(module: nn.Module) -> dict[str, Nf4Packing]:
    """What is packed in `module`, by the parameter's name."""
    return {f"{n}.weight": layer.packed for n, layer in module.named_modules() if isinstance(layer, Nf4Linear)}
