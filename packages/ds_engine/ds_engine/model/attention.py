"""Causal attention over packed sequences, plugged into Hugging Face models as one attention implementation.

The model sees one row of T tokens; borders travel beside it as a `Packing`, so no [T, T] mask exists and no token is
padding. Four kernels give the same result:

* flash4   FlashAttention-4, the package flash-attn-4 (Hopper and Blackwell, bf16 or fp16)
* flash    flash-attn's varlen kernel (CUDA, bf16 or fp16)
* varlen   torch.nn.attention.varlen, FlashAttention inside torch (CUDA, bf16 or fp16)
* sdpa     torch's scaled_dot_product_attention, once per sequence (any device and dtype)

On the CPU, 128 sequences of about 32 tokens take as long one by one as padded into one [S, L] call (25 to 27 ms a layer
forward and backward, one core), and ragged ones take less, so there is no padded variant. Splitting with
`Tensor.split` matters: slices would each scatter a full-length gradient in the backward pass (5x slower).
"""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import EngineConfigError, ModelError
from .flash4 import flash4_attention
from .sequence_parallel import SequenceGroup, gather_heads, scatter_heads

if TYPE_CHECKING:
    from ..config import Attention

__all__ = ["ATTENTION_NAME", "Packing", "choose_kernel", "packed_attention", "register_packed_attention"]

ATTENTION_NAME = "plinth_packed"
"""The name under which transformers knows this implementation."""

_CHANGES_SCORES = ("softcap", "s_aux", "position_bias", "cum_seq_lens")


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where the sequences of a packed row begin and end, and which kernel is to run."""

    cu_seqlens_S1: Tensor
    """int32, on the device of the tokens."""
    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    max_seqlen: int
    kernel: str
    """flash4, flash, varlen or sdpa."""
    sequence: SequenceGroup | None = None
    """The ranks that have a slice of the row each; the borders are those of the whole row."""


def choose_kernel(wanted: Attention, *, device_type: str, dtype: torch.dtype) -> str:
    """The kernel for `wanted` ("auto": the first that can run here). Raises EngineConfigError when it cannot run."""
    on_gpu = device_type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if wanted == "sdpa" or (wanted == "auto" and not on_gpu):
        return "sdpa"
    if not on_gpu:
        raise EngineConfigError(
            f"attention={wanted!r} needs CUDA and bf16 or fp16, not {device_type} and {dtype}: use auto or sdpa"
        )
    for kernel, (module, package) in _MODULES.items():
        if wanted not in ("auto", kernel):
            continue
        if _has(module) and (kernel != "flash4" or torch.cuda.get_device_capability()[0] in _FLASH4_RUNS_ON[wanted]):
            return kernel
        if wanted == kernel:
            raise EngineConfigError(f"attention={wanted!r} needs {package}, which is not here: use auto")
    return "sdpa"


_MODULES = {
    "flash4": ("flash_attn.cute", "flash-attn-4 and a Hopper or Blackwell GPU"),
    "flash": ("flash_attn", "flash-attn"),
    "varlen": ("torch.nn.attention.varlen", "torch.nn.attention.varlen (torch 2.10 or newer)"),
}
"""What kernels need, the fastest first."""

_FLASH4_RUNS_ON = {"auto": (9,), "flash4": (9, 10)}
"""Major compute capabilities; on Blackwell, where it has not been measured, it has to be asked for."""


def _has(module: str) -> bool:
    """flash-attn-4 alone leaves a folder flash_attn without a module of its own."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # the parent's
        return False
    return spec is not None and spec.origin is not None


def register_packed_attention() -> None:
    """Make `attn_implementation=ATTENTION_NAME` known to transformers. Calling it again changes nothing."""
    from transformers import AttentionInterface

    # Without an entry of the same name among the mask functions transformers builds no mask, as wanted here.
    AttentionInterface.register(ATTENTION_NAME, packed_attention)


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in the form transformers calls it.

    Args:
        query: [1, heads, T, head dim]; key and value: [1, kv heads, T, head dim].
        sliding_window: a token sees itself and the `sliding_window - 1` before it; None: all before it.
        packing: borders; handed down by the packed forward.

    Returns:
        ([1, T, heads, head dim], None)

    Raises:
        ModelError: the model does not hand `packing` down, or asks for scores this function does not compute.
    """
    del dropout  # log-probs must not be noisy: every attention dropout is off
    if packing is None:
        raise ModelError(
            f"{type(module).__name__} did not receive the packed borders: its forward does not hand keyword "
            "arguments on to attention, so sequences would see each other"
        )
    unsupported = [name for name in _CHANGES_SCORES if kwargs.get(name) is not None]
    if unsupported:
        raise ModelError(f"{type(module).__name__} asks for {', '.join(unsupported)}, which packed attention lacks")
    if sliding_window is not None and sliding_window >= packing.max_seqlen:
        sliding_window = None
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q_Thd, k_Thd, v_Thd = (x[0].transpose(0, 1) for x in (query, key, value))
    if packing.sequence is not None:
        q_Thd, k_Thd, v_Thd = scatter_heads(q_Thd, k_Thd, v_Thd, packing.sequence)
    out = _KERNELS[packing.kernel](q_Thd, k_Thd, v_Thd, packing, scale, sliding_window)
    if packing.sequence is not None:
        out = gather_heads(out, packing.sequence)
    return out.unsqueeze(0), None


def _flash4(
    q_Thd: Tensor, k_Thd: Tensor, v_Thd: Tensor, packing: Packing, scale: float, sliding_window: int | None
) -> Tensor:
    return flash4_attention(q_Thd, k_Thd, v_Thd, packing.cu_seqlens_S1, packing.max_seqlen, scale, sliding_window)


def _flash(
    q_Thd: Tensor, k_Thd: Tensor, v_Thd: Tensor, packing: Packing, scale: float, sliding_window: int | None
) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    window = (sliding_window - 1, 0) if sliding_window is not None else (-1, -1)
    borders, longest = packing.cu_seqlens_S1, packing.max_seqlen
    out: Tensor = flash_attn_varlen_func(
        q_Thd, k_Thd, v_Thd, borders, borders, longest, longest, softmax_scale=scale, causal=True, window_size=window
    )
    return out


def _varlen(
    q_Thd: Tensor, k_Thd: Tensor, v_Thd: Tensor, packing: Packing, scale: float, sliding_window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    known = _varlen_parameters()
    num_groups = q_Thd.shape[1] // k_Thd.shape[1]
    options: dict[str, Any] = {"scale": scale}
    if "enable_gqa" in known:
        options["enable_gqa"] = num_groups > 1
    if "window_size" in known:
        options["window_size"] = (sliding_window - 1 if sliding_window is not None else -1, 0)
    elif sliding_window is not None:
        raise ModelError("this torch's varlen attention has no sliding window: use attention=flash or sdpa")
    else:
        options["is_causal"] = True
    borders, longest = packing.cu_seqlens_S1, packing.max_seqlen
    out = varlen_attn(q_Thd, k_Thd, v_Thd, borders, borders, longest, longest, **options)
    assert isinstance(out, Tensor), "no auxiliary output was asked for"
    return out


@torch.compiler.assume_constant_result
def _varlen_parameters() -> tuple[str, ...]:
    """Names of what this torch's varlen_attn takes; a constant to torch.compile, which cannot look."""
    from torch.nn.attention.varlen import varlen_attn

    return tuple(inspect.signature(varlen_attn).parameters)


def _sdpa_per_sequence(
    q_Thd: Tensor, k_Thd: Tensor, v_Thd: Tensor, packing: Packing, scale: float, sliding_window: int | None
) -> Tensor:
    lengths = list(packing.lengths)
    share_kv = q_Thd.shape[1] != k_Thd.shape[1]
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q_Thd, k_Thd, v_Thd))
    outs = []
    for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True):
        length = q.shape[2]
        if sliding_window is not None and length > sliding_window:
            mask_LL = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
            mask_LL = mask_LL.triu(1 - sliding_window)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_LL, scale=scale, enable_gqa=share_kv)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=share_kv)
        outs.append(out)
    return torch.cat(outs, dim=2)[0].transpose(0, 1)


_KERNELS = {"flash4": _flash4, "flash": _flash, "varlen": _varlen, "sdpa": _sdpa_per_sequence}
