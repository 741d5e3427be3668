"""Compiles each transformer layer with torch.compile."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch

from ..errors import EngineConfigError, ModelError
from ..upstream import FENCE
from .attention import ATTENTION_NAME, packed_attention, varlen_parameters
from .experts import keep_out_of_graphs
from .parts import decoder_layers
from .tiled_mlp import tile_mlps

RECOMPUTATION = FENCE.patch(
    name="recomputation in compiled layers",
    reason="the backward pass recomputes norms and products from tensors that are kept anyway",
    otherwise="stock path",
    replaces={"torch._functorch.config": ("ban_recompute_materialized_backward",)},
    reads={"torch._inductor.compile_fx": ("compile_fx",)},
)
LINEAR = FENCE.patch(
    name="linear in compiled layers",
    reason="DeepSpeed's replacement of it at stage 3 reads attributes of weights that recompile each layer",
    otherwise="stock path",
    replaces={"torch.nn.functional": ("linear",), "torch.nn:Module": ("_compiled_call_impl",)},
    reads={"torch._C._nn": ("linear",)},
)
WORKERS = FENCE.patch(
    name="compile workers that stay",
    reason="torch ends idle compile workers after 60 s; from Python 3.12 on, a kernel that is to be compiled in the "
    "same milliseconds waits for them forever",
    otherwise="stock path",
    replaces={"torch._inductor.config": ("quiesce_async_compile_pool",)},
)
FUNCTORCH_CONFIG = {"ban_recompute_materialized_backward": False}
"""Config for the layers' graphs: the backward pass recomputes normalized inputs and the MLP's product from tensors that
are kept anyway, fused into the kernels that read them."""


def _inductor(graph: Any, inputs: Any) -> Any:
    import torch._functorch.config
    from torch._inductor.compile_fx import compile_fx

    with torch._functorch.config.patch(FUNCTORCH_CONFIG):
        RECOMPUTATION.calls["ban_recompute_materialized_backward"] += 1
        return compile_fx(graph, inputs)


def compile_layers(
    model: Any, *, device_type: str, kernel: str, stage: int = 2, backend: Any = None, tiled_mlp: int = 0
) -> None:
    """Compile each transformer layer in place; names, parameters and activation checkpointing stay the same.

    One compilation serves any number of tokens. SDPA attention is excluded: it loops over the sequence lengths, so
    every batch would recompile. The flash4, flash and varlen kernels are single calls and stay in the graph, where the
    code around them is fused with norms and rotary embeddings.

    Args:
        kernel: the engine's attention kernel, see `choose_kernel`.
        stage: ZeRO stage; the hooks with which stage 3 gathers a layer's weights stay outside the graph.
        backend: backend of torch.compile; None: inductor.
        tiled_mlp: tokens of a tile (tiled_mlp.py), for which each MLP is compiled apart from its layer; 0: none.

    Raises:
        EngineConfigError: no C++ compiler is found (CPU).
        ModelError: the model has no transformer layers.
    """
    if device_type == "cpu" and not any(map(shutil.which, ("g++", "clang++"))):
        raise EngineConfigError("it needs a C++ compiler (g++ or clang++) on the CPU", field="compile", value=True)
    layers = decoder_layers(model)
    if not layers:
        raise ModelError(f"{type(model).__name__} has no transformer layers to compile")
    if kernel == "sdpa":
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(packed_attention))
    keep_out_of_graphs(model)
    if WORKERS.check():
        from torch._inductor import config as inductor_config

        WORKERS.replace(inductor_config, quiesce_async_compile_pool=False)
    # Here and not as a decorator, which imports the compiler (2 s) also where nothing is compiled.
    torch.compiler.assume_constant_result(varlen_parameters)
    if backend is None:
        backend = _inductor if RECOMPUTATION.check() else "inductor"
    has_own_linear = LINEAR.check()

    def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
        result = torch.compile(call, dynamic=True, backend=backend)
        return _with_own_linear(result) if has_own_linear else result

    if tiled_mlp:
        tile_mlps(model, tiled_mlp, compiled=compiled)
    for layer in layers:
        if stage == 3:
            layer.forward = compiled(layer.forward)
        else:
            layer.compile(dynamic=True, backend=backend)
            if has_own_linear:
                LINEAR.replace(layer, _compiled_call_impl=_with_own_linear(layer._compiled_call_impl))


def _with_own_linear(call: Callable[..., Any]) -> Callable[..., Any]:
    """Call the compiled layer with torch's own `linear`.

    At stage 3 DeepSpeed replaces torch.nn.functional.linear in the whole process, so that no view of a gathered weight
    is saved for the backward pass. Compiled layers save no such view, and the attributes that the replacement reads
    from the weights would make torch 2.11 recompile each layer.
    """

    def with_own_linear(*args: Any, **kwargs: Any) -> Any:
        restore = LINEAR.replace(torch.nn.functional, linear=torch._C._nn.linear)
        try:
            return call(*args, **kwargs)
        finally:
            restore()

    return with_own_linear
