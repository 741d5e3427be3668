"""Tiled MLP: a layer's MLP runs over tiles of tokens, so that the intermediate activations of one tile live at a time.

Only the MLP's input is kept. The backward pass computes each tile again, and sums the tiles' gradients of a weight in
fp32 before they are rounded once to the weight's dtype. Each weight gets one gradient per backward pass, so that ZeRO's
hooks run as without tiles; at stage 3 one gather serves all tiles of a pass. Source: Bekman et al., Arctic Long
Sequence Training, arXiv:2506.13996.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError
from .parts import decoder_layers

Call = Callable[[Tensor], Tensor]


def tile_mlps(model: Any, tokens: int, *, compiled: Callable[[Call], Call] | None = None) -> None:
    """Replace the forward of each layer's `mlp`; call it after adapters are added.

    Args:
        tokens: tokens of a tile. An MLP whose input is no longer than a tile runs as it is.
        compiled: compiles one MLP's forward. The loop over tiles itself stays outside of compiled graphs.

    Raises:
        ModelError: the model has no layers, or a layer has no module `mlp`.
    """
    layers = decoder_layers(model)
    if not layers or not all(isinstance(getattr(layer, "mlp", None), nn.Module) for layer in layers):
        raise ModelError(
            f"{type(model).__name__}: tiled_mlp needs layers whose MLP is called mlp", remedy="set tiled_mlp=0"
        )
    for layer in layers:
        call = layer.mlp.forward if compiled is None else compiled(layer.mlp.forward)
        forward = partial(_forward, layer.mlp, call, tokens)
        layer.mlp.forward = forward if compiled is None else torch.compiler.disable(forward)


def _forward(mlp: nn.Module, call: Call, tokens: int, hidden: Tensor, *others: Any, **options: Any) -> Tensor:
    """The new forward of one MLP."""
    if others or options:
        raise ModelError(f"tiled_mlp: {type(mlp).__name__} takes more than hidden states")
    if hidden.shape[:-1].numel() <= tokens:
        return call(hidden)
    out: Tensor = _Tiles.apply(call, tokens, hidden, *(p for p in mlp.parameters() if p.requires_grad))
    return out


def _split(tensor: Tensor, tokens: int) -> Iterator[Tensor]:
    """Views [1, n, H] of the tiles of [..., H]."""
    return iter(tensor.view(1, -1, tensor.shape[-1]).split(tokens, dim=1))


class _Tiles(torch.autograd.Function):
    """Saves the MLP's input alone. Weights are inputs, so that autograd takes their gradients, but are not saved: stage
    3 releases them in between, and has gathered them again when the backward pass of the layer begins."""

    @staticmethod
    def forward(ctx: Any, call: Call, tokens: int, hidden: Tensor, *weights: Tensor) -> Tensor:
        hidden = hidden.contiguous()
        ctx.call, ctx.tokens, ctx.weights = call, tokens, weights
        ctx.save_for_backward(hidden)
        out = torch.empty_like(hidden)
        for given, place in zip(_split(hidden, tokens), _split(out, tokens), strict=True):
            result = call(given)
            if not isinstance(result, Tensor) or result.shape != given.shape:
                raise ModelError("tiled_mlp: the MLP's output has not the shape of its input")
            place.copy_(result)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        sums: list[Tensor | None] = [None] * len(ctx.weights)
        tiles = (_split(tensor, ctx.tokens) for tensor in (hidden, grad.contiguous(), grad_hidden))
        for given, grad_out, place in zip(*tiles, strict=True):
            leaf = given.detach().requires_grad_()
            with torch.enable_grad():
                result = ctx.call(leaf)
            # Gradients are returned, not accumulated, so that none of DeepSpeed's hooks run for a tile.
            grad_leaf, *parts = torch.autograd.grad(result, [leaf, *ctx.weights], grad_out, allow_unused=True)
            del result
            place.copy_(grad_leaf)
            for index, part in enumerate(parts):
                _add(sums, index, part)
        grads = []
        for weight in ctx.weights:
            total = sums.pop(0)
            grads.append(None if total is None else total.to(weight.dtype))
        return None, None, grad_hidden if ctx.needs_input_grad[2] else None, *grads


def _add(sums: list[Tensor | None], index: int, part: Tensor | None) -> None:
    """Add a tile's gradient; a mixture's expert without tokens in any tile has none."""
    total = sums[index]
    if part is None:
        return
    if total is None:
        sums[index] = part.to(torch.promote_types(part.dtype, torch.float32))
    else:
        total += part
