"""NF4 base weights for LoRA (QLoRA, Dettmers et al. 2023, arXiv 2305.14314): the format and the linear layers in it.

A weight matrix is flattened into blocks of 64 elements. Each block stores its largest magnitude m in fp32. Each element
w stores the index of the value v nearest to w / m out of 16, which are quantiles of a normal distribution scaled to
[-1, 1]:

    w' = m v,   |w' - w| <= m * 0.1519   (half the widest gap between two values)

Memory layout: numel / 2 bytes of indices, two per byte with the first one in the high bits, followed by the fp32 scale
of each block: 4.5 bits per element. Implemented with plain torch operators. Indices, scales and dequantized weights are
bit-identical to those of bitsandbytes.functional.quantize_4bit and dequantize_4bit on the CPU (tested).

In the model, the weight of a layer remains one frozen parameter under its name, flat and labeled with the model's
dtype: ZeRO-3 shards, offloads and gathers it like any other parameter; at stages 1 and 2 every rank holds all of it.
The dequantized weight exists only during a matrix product: once in the forward and once in the backward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..nf4_size import NF4_BLOCK, NF4_CHUNK, nf4_bytes
from ..upstream import FENCE
from .parts import linear_layers

SHARDS = FENCE.patch(
    name="sharded NF4 weights",
    reason="DeepSpeed shards only parameters of modules that it converts itself",
    otherwise="refused",
    replaces={"deepspeed.runtime.zero.partition_parameters": ("ds_tensor",)},
    reads={
        "deepspeed.runtime.zero.partition_parameters": (
            *("ds_id", "ds_shape", "convert_to_zero_parameters(param_list)"),
        )
    },
)
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Value of each index, before multiplication by the block's scale."""


@dataclass(frozen=True, kw_only=True)
class Nf4Packing:
    """Converts a weight of one shape and dtype to NF4 (`pack`) and back (`unpack`).

    The packed tensor is flat and holds the bytes described above. Its dtype is `dtype` too, as a label only: DeepSpeed
    selects parameters by dtype and otherwise only copies their bytes.

    Raises:
        ValueError: the number of elements is not a multiple of the block size.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    """Dtype of the original and of the dequantized weight."""

    def __post_init__(self) -> None:
        nf4_bytes(self.numel)  # raises if the blocks are not complete

    @property
    def numel(self) -> int:
        """Number of elements of the dequantized weight."""
        return math.prod(self.shape)

    @torch.no_grad()
    def pack(self, weight: Tensor) -> Tensor:
        """Quantize `weight` of this shape; returns [nf4_bytes / itemsize] labeled `dtype`, on the same device.

        Raises:
            ValueError: the weight contains inf or nan.
        """
        flat = weight.detach().reshape(-1)
        out = torch.empty(nf4_bytes(self.numel), dtype=torch.uint8, device=flat.device)
        indices, scales = self._parts(out)
        bounds = _bounds(flat.device)
        for start in range(0, self.numel, NF4_CHUNK):
            blocks = flat[start : start + NF4_CHUNK].float().view(-1, NF4_BLOCK)
            largest = blocks.abs().amax(dim=1)
            scales[start // NF4_BLOCK : start // NF4_BLOCK + len(blocks)] = largest
            # The clamp avoids 0 / 0 in blocks of zeros, where the scale makes any index right.
            scaled = (blocks * (1.0 / largest.clamp(min=1e-38))[:, None]).clamp_(-1, 1)
            index = torch.bucketize(scaled.view(-1), bounds, out_int32=True).to(torch.uint8)
            indices[start // 2 : (start + len(index)) // 2] = (index[::2] << 4) | index[1::2]
        if not scales.isfinite().all():
            raise ValueError("it contains inf or nan")
        return out.view(self.dtype)

    @torch.no_grad()
    def unpack(self, packed: Tensor) -> Tensor:
        """Dequantize what `pack` returned; the result has this shape and dtype."""
        indices, scales = self._parts(packed.detach().view(torch.uint8))
        pairs = _pairs(packed.device)
        out = torch.empty(self.numel, dtype=self.dtype, device=packed.device)
        for start in range(0, self.numel, NF4_CHUNK):
            stop = min(start + NF4_CHUNK, self.numel)
            values = pairs.index_select(0, indices[start // 2 : stop // 2].int()).view(-1, NF4_BLOCK)
            scale = scales[start // NF4_BLOCK : stop // NF4_BLOCK, None]
            torch.mul(values, scale, out=values)
            out[start:stop].view(-1, NF4_BLOCK).copy_(values)
        return out.view(self.shape)

    def _parts(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Split the bytes into (indices [numel / 2] uint8, scales [numel / NF4_BLOCK] fp32)."""
        scales = packed[self.numel // 2 :]
        # A parameter gathered by DeepSpeed may start at any offset in its bucket.
        aligned = scales.storage_offset() % 4 == 0
        return packed[: self.numel // 2], (scales if aligned else scales.clone()).view(torch.float32)


def _values(device: torch.device) -> Tensor:
    return torch.tensor(VALUES, dtype=torch.float32, device=device)


@cache
def _bounds(device: torch.device) -> Tensor:
    """[15] midpoints between neighboring values."""
    values = _values(device)
    return (values[1:] + values[:-1]) / 2


@cache
def _pairs(device: torch.device) -> Tensor:
    """[256, 2] unscaled values of the two indices in each possible byte."""
    byte = torch.arange(256, device=device)
    return _values(device)[torch.stack((byte >> 4, byte & 15), dim=1)]


class Nf4Linear(nn.Linear):
    """Linear layer y = x W'^T + b whose weight is dequantized for each call. PEFT adapts it like an nn.Linear."""

    def __init__(self, linear: nn.Linear, weight_M: nn.Parameter, packed: Nf4Packing) -> None:
        """Replace `linear`; `weight_M` holds its weight as returned by `packed.pack`."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = packed
        self.weight = weight_M
        self.bias = linear.bias
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] to [..., out] in the input's dtype, which must be the model's."""
        return cast("Tensor", _Product.apply(input, self.weight, self.bias, self.packed))


class _Product(torch.autograd.Function):
    """Product with a dequantized weight. Plain autograd would keep that weight until the backward pass."""

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
    """Quantize every linear layer of the backbone to NF4, in place; embeddings and head keep their dtype.

    Layers are converted one at a time, and the original weight is freed before the next one. Weights sharded by ZeRO-3
    are gathered and sharded again, so every rank must call this; all ranks compute identical bits.

    Args:
        device: device that quantizes and keeps the weights; ZeRO-3 keeps sharded weights where they are.

    Raises:
        ModelError: the backbone has no linear layer, or a weight is not a multiple of 64 elements or not finite.
    """
    layers = linear_layers(model, nn.Linear)
    if not layers:
        raise ModelError(f"{type(model).__name__} has no linear layer in its backbone to quantize")
    for name in list(layers):
        linear = layers.pop(name)
        try:
            model.set_submodule(name, _packed(linear, device))
        except ValueError as error:
            problem = f"{name}.weight cannot be packed: {error}"
            raise ModelError(problem, field="lora.base_format", value="nf4", remedy="use plain") from None


def _packed(linear: nn.Linear, device: torch.device) -> Nf4Linear:
    old: Any = linear.weight
    packed = Nf4Packing(shape=tuple(getattr(old, "ds_shape", old.shape)), dtype=old.dtype)
    if not hasattr(old, "ds_id"):
        return Nf4Linear(linear, nn.Parameter(packed.pack(old.to(device)), requires_grad=False), packed)
    import deepspeed

    SHARDS.check()
    with deepspeed.zero.GatheredParameters([old]):
        weight_M = nn.Parameter(packed.pack(old), requires_grad=False)
    old.convert_to_zero_parameters(param_list=[weight_M])
    # Frees the shard now: DeepSpeed's closures keep the old parameter in a reference cycle.
    SHARDS.replace(old, ds_tensor=None)
    return Nf4Linear(linear, weight_M, packed)


def nf4_weights(model: Any) -> list[str]:
    """Names of the weights that `quantize_base` quantizes."""
    return [f"{name}.weight" for name in linear_layers(model, nn.Linear)]


def round_to_nf4(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantized weight of a layer that was loaded in `dtype` and quantized; shape of `weight`, in `dtype`."""
    packed = Nf4Packing(shape=tuple(weight.shape), dtype=dtype)
    return packed.unpack(packed.pack(weight.to(dtype)))


def nf4_packings(module: nn.Module) -> dict[str, Nf4Packing]:
    """The packing of each NF4 weight in `module`, keyed by parameter name."""
    return {f"{n}.weight": layer.packed for n, layer in module.named_modules() if isinstance(layer, Nf4Linear)}
