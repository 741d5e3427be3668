"""torch.compile, layer by layer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch

from ..errors import EngineConfigError, ModelError
from .attention import ATTENTION_NAME, packed_attention
from .parts import transformer_layers

__all__ = ["KEEP_LESS", "compile_layers"]

KEEP_LESS = {"ban_recompute_materialized_backward": False}
"""torch._functorch.config for the graphs of layers: normalised inputs and the product inside an MLP, which the backward
pass multiplies by gradients, are made again from what is kept anyway, in the kernels that read that."""


def _inductor(graph: Any, inputs: Any) -> Any:
    import torch._functorch.config
    from torch._inductor.compile_fx import compile_fx

    with torch._functorch.config.patch(KEEP_LESS):
        return compile_fx(graph, inputs)


def compile_layers(model: Any, *, device_type: str, kernel: str, stage: int = 2, backend: Any = _inductor) -> None:
    """Compile each transformer layer in place; names, parameters and activation checkpointing stay as they are.

    One compilation serves any number of tokens. Attention by SDPA stays out of it: its loop follows the lengths of the
    batch, so every batch would be compiled anew. The flash4, flash and varlen kernels are single calls and stay in:
    what lies around them is fused with norms and rotary embeddings, the layout of all-to-alls with it.

    Args:
        kernel: that of the engine, see `choose_kernel`.
        stage: of ZeRO; stage 3 gathers a layer's weights in hooks around it, which stay out.
        backend: torch.compile's.

    Raises:
        EngineConfigError: there is no compiler.
        ModelError: the model has no layers to be found.
    """
    if device_type == "cpu" and not any(map(shutil.which, ("g++", "clang++"))):
        raise EngineConfigError("compile=True needs a C++ compiler (g++ or clang++) on the CPU")
    layers = transformer_layers(model)
    if not layers:
        raise ModelError(f"{type(model).__name__} has no transformer layers to compile")
    if kernel == "sdpa":
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(packed_attention))
    for layer in layers:
        if stage == 3:
            layer.forward = _with_own_linear(torch.compile(layer.forward, dynamic=True, backend=backend))
        else:
            layer.compile(dynamic=True, backend=backend)
            layer._compiled_call_impl = _with_own_linear(layer._compiled_call_impl)


def _with_own_linear(call: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeed puts a function of its own in the place of torch's linear for the whole process once any model in it is
    at stage 3, so that no view of a gathered weight is kept for the backward pass. Compiled layers keep none, and
    torch 2.11 would compile each of them anew for what that function looks at in its weights."""

    def with_own_linear(*args: Any, **kwargs: Any) -> Any:
        functional: Any = torch.nn.functional
        replaced, functional.linear = functional.linear, torch._C._nn.linear
        try:
            return call(*args, **kwargs)
        finally:
            functional.linear = replaced

    return with_own_linear
