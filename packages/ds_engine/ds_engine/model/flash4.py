"""FlashAttention-4 (flash-attn-4, CuTe DSL) on packed rows, as a custom operator that torch.compile can trace.

Runs on Hopper and Blackwell. The kernels implement grouped-query attention, so keys and values are not repeated.
Source: Dao-AILab/flash-attention, flash_attn/cute/interface.py; torch.nn.attention.activate_flash_attention_impl calls
the same two functions.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..upstream import FENCE

KERNELS = FENCE.patch(
    name="FlashAttention-4",
    reason="its public function does not return the log-sum-exp that a custom operator must save; others replace it",
    otherwise="stock path",
    reads={"flash_attn.cute.interface": ("_flash_attn_fwd", "_flash_attn_bwd")},
)

# The kernels' compiler says at every compilation that it treats their unused `aux_data` as a constant.
warnings.filterwarnings("ignore", r"Argument aux_data .*cannot be converted to a JitArgument", UserWarning)


def flash4_attention(
    q_Thd: Tensor, k_Thd: Tensor, v_Thd: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int | None
) -> Tensor:
    """Compute causal attention within each sequence; returns [T, heads, head dim].

    Args:
        cu_seqlens: [S + 1] int32 cumulative sequence lengths.
        max_seqlen: number of tokens of the longest sequence.
        window: number of tokens a token attends to, itself included; None attends to all tokens before it.
    """
    return torch.ops.ds_engine.flash4(q_Thd, k_Thd, v_Thd, cu_seqlens, max_seqlen, scale, window)[0]  # type: ignore[no-any-return]


def _kernel_options(cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int | None) -> dict[str, Any]:
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_k": max_seqlen,
        "softmax_scale": scale,
        "causal": True,
        "window_size_left": None if window is None else window - 1,
    }


@torch.library.custom_op("ds_engine::flash4", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    out, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, **_kernel_options(cu_seqlens, max_seqlen, scale, window))
    return out, lse


@_forward.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("ds_engine::flash4_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from flash_attn.cute.interface import _flash_attn_bwd

    deterministic = torch.are_deterministic_algorithms_enabled()
    options = _kernel_options(cu_seqlens, max_seqlen, scale, window) | {"deterministic": deterministic}
    dq, dk, dv, *_ = _flash_attn_bwd(q, k, v, out, grad.contiguous(), lse, **options)
    return dq, dk, dv


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def _autograd_backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    del grad_lse  # the log-sum-exp is not an output of flash4_attention
    return (*torch.ops.ds_engine.flash4_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None)


_forward.register_autograd(_autograd_backward, setup_context=_save_for_backward)
