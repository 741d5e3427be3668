"""Stage 3, a transformer layer at a time: gathered and released as a whole, with hooks around it and none inside.

DeepSpeed gathers weights in hooks of every submodule, sixteen times a layer, each some microseconds of Python that the
device waits for, and each a border that torch.compile cannot cross. A layer that is one of its leaf modules has its
weights gathered by hooks of its own, all at once, and its gradients reduced together when its backward pass is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..model.parts import transformer_layers
from .zero3_gather import parameter_offload

if TYPE_CHECKING:
    from ..config import ZeroConfig

__all__ = ["gathers_layers", "make_leaves", "shorten_hooks"]

_REMEMBERED = "_ds_engine_parameters"
"""Attribute of a leaf and of the model: all of its parameters."""


def gathers_layers(zero: ZeroConfig) -> bool:
    """Whether an engine of these settings gathers layer by layer; else DeepSpeed does so module by module.

    Weights on NVMe pass through a few buffers of DeepSpeed's, each for one parameter: a layer has more of them.
    """
    return zero.stage == 3 and zero.offload.param != "nvme"


def make_leaves(model: Any) -> None:
    """Make leaf modules of the layers of a transformers model, before DeepSpeed takes it over and once it is complete
    (adapters put in). A model without layers stays as it is."""
    from deepspeed.utils.z3_leaf_module import set_z3_leaf_module

    for layer in transformer_layers(model):
        set_z3_leaf_module(layer, True)
        layer.register_forward_pre_hook(_ask_for_gradient)
        setattr(layer, _REMEMBERED, tuple(layer.parameters()))
    setattr(model, _REMEMBERED, tuple(model.parameters()))
    _remember_parameters()


def shorten_hooks(model: Any, zero_optimizer: Any) -> None:
    """Have one autograd function at either end of a layer do what DeepSpeed has two for at each, which bind their
    arguments by signature and run without gradients too.

    Args:
        zero_optimizer: DeepSpeed's of stage 3, or what stands in its place for a frozen model; after `make_leaves`.
    """
    offload = parameter_offload(zero_optimizer)
    deepspeeds = {handle.id for handle in getattr(zero_optimizer, "_leaf_module_hooks", ())}
    for layer in transformer_layers(model):
        if not deepspeeds.issuperset(layer._backward_hooks):
            continue  # somebody else's, too: they stay in order
        hooks = list(layer._backward_hooks.values())
        layer._backward_hooks.clear()
        layer.pre_bwd_fn = _WhereGradients(partial(_BeforeBackward.apply, layer, offload))
        layer.post_bwd_fn = _WhereGradients(partial(_AfterBackward.apply, layer, offload, hooks))


@dataclass(frozen=True)
class _WhereGradients:
    """What DeepSpeed's hooks take for an autograd function. Without gradients it does nothing."""

    function: Callable[[Tensor], Tensor]

    def apply(self, tensor: Tensor) -> Tensor:
        return self.function(tensor) if torch.is_grad_enabled() else tensor


class _BeforeBackward(torch.autograd.Function):
    """Around an output of a layer: its backward pass begins with gathering the weights."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, offload: Any, output: Tensor) -> Tensor:
        ctx.layer, ctx.offload = layer, offload
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.offload.pre_sub_module_backward_function(ctx.layer)
        return None, None, *gradients


class _AfterBackward(torch.autograd.Function):
    """Around an input of a layer: when all of them have their gradients, so have the parameters, which are reduced,
    and the weights may go. DeepSpeed sets the count to zero before each forward pass."""

    @staticmethod
    def forward(ctx: Any, layer: Any, offload: Any, reduce: Sequence[Callable[..., None]], given: Tensor) -> Tensor:
        ctx.layer, ctx.offload, ctx.reduce = layer, offload, reduce
        if given.requires_grad:
            layer.ds_grads_remaining += 1
        return given.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        layer = ctx.layer
        layer.ds_grads_remaining -= 1
        if layer.ds_grads_remaining == 0:
            for hook in ctx.reduce:
                hook(layer, None, None)
            ctx.offload.post_sub_module_backward_function(layer)
        return None, None, None, *gradients


def _ask_for_gradient(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The end of a layer's backward pass is when its input has its gradient. What comes from frozen embeddings would
    have none: DeepSpeed would reduce the layer's gradients before there are any."""
    if not torch.is_grad_enabled():
        return None
    if not args or not isinstance(args[0], Tensor):
        raise ModelError(f"{type(layer).__name__} is not handed its hidden states as first argument, as stage 3 needs")
    hidden = args[0]
    if hidden.requires_grad or not any(p.requires_grad for p in layer.parameters()):
        return None
    return (hidden.detach().requires_grad_(), *args[1:])


def _remember_parameters() -> None:
    """DeepSpeed walks through the submodules of a leaf several times before and after it runs, and through all of the
    model's in every step; once is enough."""
    from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator

    walk = partitioned_param_coordinator.iter_params
    if getattr(walk, "remembers", False):
        return

    def iter_params(module: Any, recurse: bool = False) -> Iterable[nn.Parameter]:
        own = getattr(module, _REMEMBERED, None) if recurse else None
        if own is None:
            return cast("Iterable[nn.Parameter]", walk(module, recurse=recurse))
        return chain(own, (parameter for _, parameter in module.ds_external_parameters()))

    iter_params.remembers = True  # type: ignore[attr-defined]
    for user in (parameter_offload, partitioned_param_coordinator):
        user.iter_params = iter_params
