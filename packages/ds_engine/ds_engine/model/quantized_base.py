"""The frozen base of adapters in four bits: its linear layers hold NF4 and unpack it where they multiply.

A layer's weight stays one parameter under its name, flat, frozen, in the model's dtype as far as anybody asks: ZeRO-3
shards, offloads and gathers it like any other, at 4.5 bits a weight, and at stages 1 and 2 every rank has all of it.
Whole, it exists for the length of one product, in the forward and once more in the backward pass.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import ModelError
from .nf4 import PackedShape

__all__ = ["Nf4Linear", "packed_shapes", "quantise_base"]


class Nf4Linear(nn.Linear):
    """y = x W' + b with W' unpacked for the call; a linear layer to PEFT."""

    def __init__(self, linear: nn.Linear, weight_M: nn.Parameter, packed: PackedShape) -> None:
        """In place of `linear`, whose weight is `packed` in `weight_M` (as `PackedShape.pack` gives it)."""
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
    def forward(ctx: Any, x: Tensor, weight_M: Tensor, bias: Tensor | None, packed: PackedShape) -> Tensor:
        ctx.save_for_backward(weight_M)
        ctx.packed = packed
        return nn.functional.linear(x, packed.unpack(weight_M), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None, None]:
        (weight_M,) = ctx.saved_tensors
        return grads[0] @ ctx.packed.unpack(weight_M), None, None, None


def quantise_base(model: Any, *, device: torch.device) -> None:
    """Put every linear layer of the backbone into NF4, in place, one after another; embeddings and head stay.

    A layer's own memory is free before the next is begun. Weights that ZeRO-3 has sharded are gathered and sharded
    again, so every rank calls this. Every rank computes the same bits.

    Args:
        device: where layers are packed and stay; those that ZeRO-3 has sharded are where it keeps them.

    Raises:
        ModelError: the backbone has no linear layer, or one whose weights are no whole blocks of 64 or not finite.
    """
    prefix = getattr(model, "base_model_prefix", "") or "model"
    backbone: Any = getattr(model, prefix, None)
    names = [n for n, m in backbone.named_modules() if type(m) is nn.Linear] if backbone else []
    if not names:
        raise ModelError(f"{type(model).__name__} has no linear layer in its backbone to put into NF4")
    for name in names:
        parent, _, child = name.rpartition(".")
        linear = backbone.get_submodule(name)
        try:
            setattr(backbone.get_submodule(parent), child, _packed(linear, device))
        except ValueError as error:
            raise ModelError(
                f"lora.base_format='nf4' cannot pack {prefix}.{name}.weight: {error}. Use base_format='plain'"
            ) from None


def _packed(linear: nn.Linear, device: torch.device) -> Nf4Linear:
    old: Any = linear.weight
    packed = PackedShape(shape=tuple(getattr(old, "ds_shape", old.shape)), dtype=old.dtype)
    if not hasattr(old, "ds_id"):
        return Nf4Linear(linear, nn.Parameter(packed.pack(old.to(device)), requires_grad=False), packed)
    import deepspeed

    with deepspeed.zero.GatheredParameters([old]):
        weight_M = nn.Parameter(packed.pack(old), requires_grad=False)
    old.convert_to_zero_parameters(param_list=[weight_M])
    old.ds_tensor = None  # DeepSpeed's closures hold the parameter in a circle; its shard need not wait for that
    return Nf4Linear(linear, weight_M, packed)


def packed_shapes(module: nn.Module) -> dict[str, PackedShape]:
    """What is packed in `module`, by the parameter's name."""
    return {f"{n}.weight": layer.packed for n, layer in module.named_modules() if isinstance(layer, Nf4Linear)}
