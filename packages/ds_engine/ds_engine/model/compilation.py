"""Compiles each transformer layer with torch.compile."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch

from ..errors import EngineConfigError, ModelError
from .attention import ATTENTION_NAME, packed_attention
from .parts import transformer_layers

FUNCTORCH_CONFIG = {"ban_recompute_materialized_backward": False}
"""Config for the layers' graphs: the backward pass recomputes normalized inputs and the MLP's product from tensors that
are kept anyway, fused into the kernels that read them."""


def _inductor(graph: Any, inputs: Any) -> Any:
    import torch._functorch.config
    from torch._inductor.compile_fx import compile_fx

    with torch._functorch.config.patch(FUNCTORCH_CONFIG):
        return compile_fx(graph, inputs)


def compile_layers(model: Any, *, device_type: str, kernel: str, stage: int = 2, backend: Any = _inductor) -> None:
    """Compile each transformer layer in place; names, parameters and activation checkpointing stay the same.

    One compilation serves any number of tokens. SDPA attention is excluded: it loops over the sequence lengths, so
    every batch would recompile. The flash4, flash and varlen kernels are single calls and stay in the graph, where the
    code around them is fused with norms and rotary embeddings.

    Args:
        kernel: the engine's attention kernel, see `choose_kernel`.
        stage: ZeRO stage; the hooks with which stage 3 gathers a layer's weights stay outside the graph.
        backend: backend of torch.compile.

    Raises:
        EngineConfigError: no C++ compiler is found (CPU).
        ModelError: the model has no transformer layers.
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
    """Call the compiled layer with torch's own `linear`.

    At stage 3 DeepSpeed replaces torch.nn.functional.linear in the whole process, so that no view of a gathered weight
    is saved for the backward pass. Compiled layers save no such view, and the attributes that the replacement reads
    from the weights would make torch 2.11 recompile each layer.
    """

    def with_own_linear(*args: Any, **kwargs: Any) -> Any:
        functional: Any = torch.nn.functional
        replaced, functional.linear = functional.linear, torch._C._nn.linear
        try:
            return call(*args, **kwargs)
        finally:
            functional.linear = replaced

    return with_own_linear
