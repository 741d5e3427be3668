"""Activation checkpointing: recomputes layers in the backward pass instead of keeping their activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from ..errors import ModelError
from ..upstream import FENCE
from .parts import transformer_layers

INPUTS = FENCE.patch(
    name="inputs of recomputed layers in CPU memory",
    reason="transformers has no option for it; without it they stay on the device",
    otherwise="stock path",
    replaces={
        "transformers.modeling_layers:GradientCheckpointingLayer": ("_gradient_checkpointing_func",),
    },
)


def enable_checkpointing(model: Any, *, to_cpu: bool = False) -> None:
    """Recompute every layer of a transformers model when it is in training mode.

    Args:
        to_cpu: keep the inputs of recomputed layers in (pinned) CPU memory until the backward pass.

    Raises:
        ModelError: the model has no layers that support activation checkpointing.
    """
    # Non-reentrant: the reentrant form nests backward passes, which ZeRO's hooks miscount.
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = [layer for layer in transformer_layers(model) if layer.gradient_checkpointing]
    if not layers:
        raise ModelError(f"{type(model).__name__} has no layers that support activation checkpointing")
    for layer in layers if to_cpu and INPUTS.check() else ():
        INPUTS.replace(layer, _gradient_checkpointing_func=_checkpoint_to_cpu)


def _checkpoint_to_cpu(call: Callable[..., Any], *args: Any) -> Any:
    # save_on_cpu sees only the layer's inputs, because the checkpoint's own hooks are the innermost ones.
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(call, *args, use_reentrant=False)
