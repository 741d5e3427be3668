"""Recurrent layers on packed rows: convolutions and scans start over at each border between sequences.

transformers' linear attention, Mamba and short convolutions mix tokens in a few functions of their modules. These know
no borders: the torch versions drop `cu_seqlens` and `seq_idx` without a word. The forward of each such layer runs with
versions that know them; projections, gates and norms stay packed.

* torch  a convolution runs over the row with zeros between the sequences, a scan over one padded row per sequence;
         a layer that has no such functions computes one padded row per sequence as a whole
* fla    kernels of flash-linear-attention (the package fla-core) with `cu_seqlens` (CUDA)

Each module is called once per micro batch, for any number of sequences, so ranks issue the same collectives at stage 3.
Shapes: T tokens of the row, S sequences of up to L tokens.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from itertools import accumulate
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ModelError
from ..upstream import FENCE
from .attention import PackedLayout
from .parts import with_globals

_CONV = "causal_conv1d_fn(hidden_states, weight, bias, activation, ...)"
_DELTA = (_CONV, "torch_chunk_gated_delta_rule(query, key, value, g, beta, ...)")
_KIMI = (_CONV, "chunk_kimi_delta_attention(query, key, value, g, beta, ...)")
_MAMBA = (_CONV, "mamba_selective_scan(hidden_states, dt, A, B, C, ...)", "mamba_inner_fn")
_MAMBA2 = (_CONV, "mamba2_chunk_scan(hidden_states, dt, A, B, C, chunk_size, ...)", "mamba2_split_conv1d_scan_combined")

_LAYERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Qwen3NextGatedDeltaNet": ("qwen3_next", _DELTA),
    "Qwen3_5GatedDeltaNet": ("qwen3_5", _DELTA),
    "Qwen3_5MoeGatedDeltaNet": ("qwen3_5_moe", _DELTA),
    "OlmoHybridGatedDeltaNet": ("olmo_hybrid", _DELTA),
    "KimiLinearDeltaAttention": ("kimi_linear", _KIMI),
    "MiniMaxLightningAttention": ("minimax", ()),
    "MambaMixer": ("mamba", _MAMBA),
    "FalconMambaMixer": ("falcon_mamba", _MAMBA),
    "JambaMambaMixer": ("jamba", _MAMBA),
    "ZambaMambaMixer": ("zamba", ()),
    "Mamba2Mixer": ("mamba2", _MAMBA2),
    "BambaMixer": ("bamba", _MAMBA2),
    "FalconH1Mixer": ("falcon_h1", _MAMBA2),
    "GraniteMoeHybridMambaLayer": ("granitemoehybrid", _MAMBA2),
    "NemotronHMamba2Mixer": ("nemotron_h", _MAMBA2),
    "Zamba2MambaMixer": ("zamba2", _MAMBA2),
    "Lfm2ShortConv": ("lfm2", (_CONV,)),
    "Lfm2MoeShortConv": ("lfm2_moe", (_CONV,)),
}
"""Family and functions of each class of layers; a class without functions computes padded rows as a whole."""


def _module(family: str) -> str:
    return f"transformers.models.{family}.modeling_{family}"


BORDERS = FENCE.patch(
    name="borders in recurrent layers",
    reason="these layers drop the borders that they are given, so that packed sequences leak into each other",
    otherwise="stock path",
    replaces={f"{_module(family)}:{name}": ("forward",) for name, (family, _) in _LAYERS.items()},
    reads={_module(family): functions for family, functions in _LAYERS.values()},
)
KERNELS = FENCE.patch(
    name="flash-linear-attention",
    reason="its functions take the borders of packed sequences, but transformers' layers do not pass them on",
    otherwise="stock path",
    reads={
        "fla.ops.gated_delta_rule": ("chunk_gated_delta_rule(q, k, v, g, beta, scale, ...)",),
        "fla.ops.kda": ("chunk_kda(q, k, v, g, beta, scale, ...)",),
        "fla.ops.simple_gla": ("chunk_simple_gla(q, k, v, g, g_gamma, scale, ...)",),
        "fla.modules.causal_conv1d": ("causal_conv1d(x, weight, bias, residual, ...)",),
    },
)


@functools.cache
def has_kernels() -> bool:
    """True if flash-linear-attention is installed in a tested version."""
    return importlib.util.find_spec("fla") is not None and KERNELS.check()


def _uses_kernels(tokens: Tensor) -> bool:
    return tokens.is_cuda and has_kernels()


def recurrent_line(model: nn.Module) -> str:
    """Classes of the recurrent layers and the way in which they got the borders; empty if there are none."""
    names = sorted({type(layer).__name__ for layer in recurrent_layers(model)})
    way = "torch" if has_kernels() else "torch (fla-core is not installed)"
    if names and _uses_kernels(next(model.parameters())):
        way = "flash-linear-attention"
    return f"{', '.join(names)} by {way}" if names else ""


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of `model` that get the borders."""
    classes = {(_module(family), name) for name, (family, _) in _LAYERS.items()}
    layers = [module for module in model.modules() if (type(module).__module__, type(module).__name__) in classes]
    return layers if layers and BORDERS.check() else []


def recurrence_per_sequence(backbone: nn.Module, *, compiled: bool = False) -> Callable[[PackedLayout | None], None]:
    """Make the recurrent layers of `backbone` compute each sequence by itself.

    Args:
        compiled: the transformer layers are compiled; their recurrent parts then run outside the graphs.

    Returns:
        A function that takes the layout of the next call; None: upstream's own computation.
    """
    borders = _Borders()
    layers = recurrent_layers(backbone)
    for layer in layers:
        BORDERS.replace(layer, forward=_with_functions(layer, borders))
        if compiled:
            layer.forward = torch.compiler.disable(layer.forward)

    def set_layout(packing: PackedLayout | None) -> None:
        names = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        if layers and packing is not None and packing.sp_group is not None:
            problem = f"{names}: a recurrence runs along all tokens of a sequence, which ranks cannot split"
            raise ModelError(problem, field="sequence_parallel", value=packing.sp_group.size, allowed="1")
        if layers and packing is not None and packing.tree is not None:
            raise ModelError(f"{names} cannot continue from the state of a shared prefix")
        borders.set(packing)

    return set_layout


def _with_functions(layer: nn.Module, borders: _Borders) -> Callable[..., Any]:
    """The layer's own forward, in which the names of `_FUNCTIONS` are bound to functions that know the borders."""
    original = inspect.unwrap(type(layer).forward)
    assert isinstance(original, FunctionType)
    own = original.__globals__
    names = _FUNCTIONS.keys() & set(original.__code__.co_names)
    if not names:
        return functools.partial(_scan, original.__get__(layer), borders, layer)
    bound = {name: functools.partial(_FUNCTIONS[name], own[name], borders, layer) for name in names}
    return with_globals(layer, **bound)


class _Borders:
    """Borders of the current packed row of one model. They stay until the next call, for recomputation."""

    def __init__(self) -> None:
        self.layout: PackedLayout | None = None
        self.cu_seqlens = self.cu_seqlens_cpu = torch.zeros(1, dtype=torch.int64, device="cpu")

    def set(self, layout: PackedLayout | None) -> None:
        self.layout = layout
        if layout is not None:
            self.cu_seqlens_cpu = torch.tensor([0, *accumulate(layout.borders.lengths)], device="cpu")
            self.cu_seqlens = layout.borders.cu_seqlens.long()

    @property
    def fla(self) -> dict[str, Tensor]:
        """Arguments of the kernels."""
        return {"cu_seqlens": self.cu_seqlens, "cu_seqlens_cpu": self.cu_seqlens_cpu}

    def lengths(self, layer: nn.Module, num_tokens: int) -> list[int] | None:
        """Lengths of the sequences in a row of `num_tokens`; None outside packed rows."""
        if self.layout is None:
            return None
        lengths = list(self.layout.borders.lengths)
        if sum(lengths) != num_tokens:
            problem = f"a {type(layer).__name__} computes {num_tokens} tokens again, but the row was of {sum(lengths)}"
            raise ModelError(problem)
        if self.layout.calls is not None:
            self.layout.calls.append(id(layer))
        return lengths


def _convolve(
    upstream: Callable[..., Tensor],
    borders: _Borders,
    layer: nn.Module,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """Causal depthwise convolution of [1, channels, T]."""
    lengths = borders.lengths(layer, hidden_states.shape[-1])
    if lengths is None:
        return upstream(hidden_states, weight, bias, activation=activation, **kwargs)
    if activation in (None, "silu", "swish") and _uses_kernels(hidden_states):
        from fla.modules.causal_conv1d import causal_conv1d

        tokens = hidden_states.transpose(1, 2)
        out: Tensor = causal_conv1d(tokens, weight, bias, activation=activation, **borders.fla)[0]
        return out.transpose(1, 2)
    index_T = torch.arange(sum(lengths), device=hidden_states.device)
    gaps = torch.arange(len(lengths), device=hidden_states.device) * (weight.shape[-1] - 1)
    index_T = index_T + gaps.repeat_interleave(borders.cu_seqlens.diff(), output_size=sum(lengths))
    spaced = hidden_states.new_zeros(*hidden_states.shape[:-1], int(sum(lengths) + gaps[-1]))
    spaced = spaced.index_copy(-1, index_T, hidden_states)
    return upstream(spaced, weight, bias, activation=activation).index_select(-1, index_T)


def _scan(
    upstream: Callable[..., Any], borders: _Borders, layer: nn.Module, *args: Any, token_dim: int = 1, **kwargs: Any
) -> Any:
    """Scan of tensors [1, ...] with T at `token_dim`, each sequence as a padded row; weights have one or two dims."""
    first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    lengths = borders.lengths(layer, first.shape[token_dim])
    if lengths is None:
        return upstream(*args, **kwargs)

    def rows(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 3:
            return value
        parts = value.transpose(1, token_dim)[0].split(lengths)
        return nn.utils.rnn.pad_sequence(parts, batch_first=True).transpose(1, token_dim)

    out = upstream(*map(rows, args), **{name: rows(value) for name, value in kwargs.items()})
    out_rows = (out[0] if isinstance(out, tuple) else out).transpose(1, token_dim)
    joined = torch.cat([row[:n] for row, n in zip(out_rows.unbind(), lengths, strict=True)]).unsqueeze(0)
    joined = joined.transpose(1, token_dim)
    return (joined, None) if isinstance(out, tuple) else joined


def _delta_rule(
    upstream: Callable[..., Any], borders: _Borders, layer: nn.Module, *args: Any, name: str, **kwargs: Any
) -> Any:
    """Gated delta rule, with one decay for each head or (Kimi) for each channel."""
    lengths = borders.lengths(layer, args[0].shape[1])
    if lengths is None or not _uses_kernels(args[0]):
        return _scan(upstream, borders, layer, *args, **kwargs)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    kernel = chunk_kda if name == "kda" else chunk_gated_delta_rule
    known = {key: kwargs[key] for key in ("g", "beta", "use_qk_l2norm_in_kernel") if key in kwargs}
    return kernel(*args, **known, **borders.fla)


def _mamba2(
    upstream: Callable[..., Any],
    borders: _Borders,
    layer: nn.Module,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    **kwargs: Any,
) -> Any:
    """Mamba-2's scan: linear attention with queries C, keys B, values dt * x and log decays dt * A."""
    lengths = borders.lengths(layer, hidden_states.shape[1])
    if lengths is None or not _uses_kernels(hidden_states):
        return _scan(upstream, borders, layer, hidden_states, dt, A, B, C, **kwargs)
    from fla.ops.simple_gla import chunk_simple_gla

    dt = dt.float() + kwargs["dt_bias"].float()
    dt = (F.softplus(dt) if kwargs["dt_softplus"] else dt).clamp(*kwargs["dt_limit"])
    copies = hidden_states.shape[2] // B.shape[2]
    C, B = (x.repeat_interleave(copies, dim=2).to(hidden_states.dtype) for x in (C, B))
    values = (hidden_states * dt[..., None]).to(hidden_states.dtype)
    out, _ = chunk_simple_gla(C, B, values, g=A.float() * dt, scale=1.0, **borders.fla)
    return out + kwargs["D"][:, None] * hidden_states


def _not_fused(upstream: Callable[..., Any], borders: _Borders, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The fused convolution and scan of a CUDA package; None, as without it: the layer computes both apart."""
    return upstream(*args, **kwargs) if borders.layout is None else None


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": functools.partial(_delta_rule, name="gated delta rule"),
    "chunk_kimi_delta_attention": functools.partial(_delta_rule, name="kda"),
    "mamba_selective_scan": functools.partial(_scan, token_dim=2),
    "mamba2_chunk_scan": _mamba2,
    "mamba_inner_fn": _not_fused,
    "mamba2_split_conv1d_scan_combined": _not_fused,
}
"""(upstream's function, borders, layer, its arguments) -> its result, by name in the layers' modules."""
