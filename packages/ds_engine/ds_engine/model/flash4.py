"""FlashAttention-4 (flash-attn-4, CuTe DSL) on packed rows, as a custom operator that torch.compile can trace.

Runs on Hopper and Blackwell. The kernels implement grouped-query attention, so keys and values are not repeated.
Shared prefixes are gathered, which leaves one causal call with more keys than queries, or read in place: one causal
call of all nodes, and for each pair of levels one call without a mask. Each pass does what costs less (prefix_tree.py).
Source: Dao-AILab/flash-attention, flash_attn/cute/interface.py; torch.nn.attention.activate_flash_attention_impl calls
the same two functions.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..upstream import FENCE
from .prefix_tree import Borders, Crossing, Crossings, Gathering, gather_paths, sum_sources

KERNELS = FENCE.patch(
    name="FlashAttention-4",
    reason="its public function does not return the log-sum-exp that a custom operator must save; others replace it",
    otherwise="stock path",
    reads={"flash_attn.cute.interface": ("_flash_attn_fwd", "_flash_attn_bwd")},
)

MOST_CALLS = 2
"""Query heads per key/value head up to which the gathered backward pass calls the kernel for each of them."""

LEAST_QUERIES = 257
"""Lower bound of the longest sequence that the forward kernel is told of. If all sequences of a micro batch fit into
one tile (at most 256 rows), flash-attn compiles a second kernel, which takes 3 s and on Hopper is the same kernel."""

# The kernels' compiler says at every compilation that it treats their unused `aux_data` as a constant.
warnings.filterwarnings("ignore", r"Argument aux_data .*cannot be converted to a JitArgument", UserWarning)


def flash4_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Borders,
    keys: Borders,
    crossings: Crossings,
    scale: float,
    window: int | None,
) -> Tensor:
    """Compute causal attention within each sequence or node, and to the ancestors of a node.

    Args:
        q: [T, heads, head dim]; k and v: [rows of `keys`, kv heads, head dim].
        keys: the borders of `queries`, or more keys than queries for each node: causal from the bottom right.
        crossings: attention of nodes to their ancestors; only where k and v are those of the T tokens.
        window: number of tokens a token attends to, itself included; None attends to all tokens before it.

    Returns:
        [T, heads, head dim]
    """
    borders = (queries.cu_seqlens, keys.cu_seqlens)
    calls = (crossings.table_C, crossings.borders, crossings.key_rows)
    sizes = (crossings.num_kept, queries.longest, keys.longest)
    out: Tensor = torch.ops.ds_engine.flash4(q, k, v, *borders, *calls, *sizes, scale, window)[0]
    return out


def flash4_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, borders: Borders, crossings: Crossings,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v of `flash4_attention` without a window, whose output and log-sum-exps [heads, T] another
    kernel has computed."""
    calls = (crossings.table_C, crossings.borders, crossings.key_rows)
    sizes = (borders.cu_seqlens, borders.cu_seqlens, *calls, borders.longest, borders.longest)
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.ds_engine.flash4_backward(
        grad, q, k, v, out, lse, None, None, *sizes, scale, None
    )
    return gradients


def _kernel_options(
    cu_seqlens: tuple[Tensor, Tensor], longest: tuple[int, int], scale: float, window: int | None, *, causal: bool
) -> dict[str, Any]:
    return {
        "cu_seqlens_q": cu_seqlens[0],
        "cu_seqlens_k": cu_seqlens[1],
        "max_seqlen_q": longest[0],
        "max_seqlen_k": longest[1],
        "softmax_scale": scale,
        "causal": causal,
        "window_size_left": None if window is None else window - 1,
    }


def _calls(table_C: Tensor, borders: Tensor, key_rows: Tensor) -> Iterator[tuple[slice, slice | Tensor, Any, Any]]:
    """For each crossing its queries, its keys, their borders and their longest lengths."""
    for row in (Crossing(*line) for line in table_C[1:].tolist()):
        if row.num == 0:
            continue
        keys: slice | Tensor = slice(row.k_start, row.k_start + row.num_keys)
        if row.k_start < 0:
            keys = key_rows[row.rows_start : row.rows_start + row.num_keys]
        size, start = row.num + 1, row.borders_start
        cu_seqlens = (borders[start : start + size], borders[start + size : start + 2 * size])
        yield slice(row.q_start, row.q_end), keys, cu_seqlens, (row.longest_q, row.longest_k)


def _paths(gathering: Gathering, borders: Tensor, key_rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The paths' cumulative lengths and rows, and for each row its places among these rows and their borders."""
    ends = gathering.borders_start + gathering.num_nodes + 1
    sizes = (gathering.num_rows, gathering.num_rows, gathering.num_keys + 1)
    return (borders[gathering.borders_start : ends], *key_rows[gathering.rows_start :][: sum(sizes)].split(sizes))


def _run_forward(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    options["max_seqlen_q"] = max(options["max_seqlen_q"], LEAST_QUERIES)
    out, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, **options)
    return out, lse


@torch.library.custom_op("ds_engine::flash4", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, table_C: Tensor, borders: Tensor, key_rows: Tensor,
    num_kept: int, longest_q: int, longest_k: int, scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, log-sum-exps, and `num_kept` rows: the keys and values of all paths, or empty ones if none are kept."""
    gathering = Gathering(*table_C[0].tolist())
    if gathering.in_forward(q.shape[1], k.shape[1]):
        cu_k, rows, *_ = _paths(gathering, borders, key_rows)
        options = _kernel_options((cu_q, cu_k), (longest_q, gathering.longest_path), scale, None, causal=True)
        k, v = gather_paths(k, v, rows)
        return *_run_forward(q, k, v, options), *((k, v) if gathering.keeps else _empty_rows(k, v, num_kept))
    options = _kernel_options((cu_q, cu_k), (longest_q, longest_k), scale, window, causal=True)
    out, lse = _run_forward(q, k, v, options)
    for part, keys, cu_seqlens, longest in _calls(table_C, borders, key_rows):
        options = _kernel_options(cu_seqlens, longest, scale, None, causal=False)
        merge(out[part], lse[:, part], *_run_forward(q[part], k[keys], v[keys], options))
    return out, lse, *_empty_rows(k, v, num_kept)


def _empty_rows(k: Tensor, v: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    return k.new_empty((num_rows, *k.shape[1:])), v.new_empty((num_rows, *v.shape[1:]))


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kept = _empty_rows(k, v, options[-5])
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32), *kept


@torch.library.custom_op("ds_engine::flash4_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept_k: Tensor | None,
    kept_v: Tensor | None, cu_q: Tensor, cu_k: Tensor, table_C: Tensor, borders: Tensor, key_rows: Tensor,
    longest_q: int, longest_k: int, scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from flash_attn.cute.interface import _flash_attn_bwd

    deterministic = torch.are_deterministic_algorithms_enabled()
    grad = grad.contiguous()
    gathering = Gathering(*table_C[0].tolist())
    if gathering.in_backward():
        cu_k, rows, sources, counts = _paths(gathering, borders, key_rows)
        options = _kernel_options((cu_q, cu_k), (longest_q, gathering.longest_path), scale, None, causal=True)
        if kept_k is None or kept_v is None or not gathering.keeps:
            kept_k, kept_v = gather_paths(k, v, rows)
        # With as many key heads as query heads the kernel writes their gradients once; else it adds them up in fp32.
        heads_per_key = q.shape[1] // k.shape[1]
        num_calls = heads_per_key if heads_per_key <= MOST_CALLS else 1
        dq = torch.empty_like(q)
        grads = [x.new_empty((len(rows), x.shape[1] * num_calls, x.shape[2])) for x in (k, v)]
        for call in range(num_calls):
            heads = slice(call, None, num_calls)
            inputs = (q[:, heads], kept_k, kept_v, out[:, heads], grad[:, heads], lse[heads])
            outs = {name: x[:, heads] for name, x in zip(("dq", "dk", "dv"), (dq, *grads), strict=True)}
            _flash_attn_bwd(*inputs, **options, **outs, deterministic=deterministic)
        dk, dv = (sum_sources(x, sources, counts, num_calls) for x in grads)
        return dq, dk, dv
    options = _kernel_options((cu_q, cu_k), (longest_q, longest_k), scale, window, causal=True)
    dq, dk, dv, *_ = _flash_attn_bwd(q, k, v, out, grad, lse, **options, deterministic=deterministic)
    for part, keys, cu_seqlens, longest in _calls(table_C, borders, key_rows):
        options = _kernel_options(cu_seqlens, longest, scale, None, causal=False)
        # With the merged output and log-sum-exp the probabilities of this part are those of the whole softmax.
        inputs = (q[part], k[keys], v[keys], out[part], grad[part], lse[:, part].contiguous())
        part_dq, part_dk, part_dv, *_ = _flash_attn_bwd(*inputs, **options, deterministic=deterministic)
        dq[part] += part_dq
        dk[keys] += part_dk  # the rows of `keys` are distinct
        dv[keys] += part_dv
    return dq, dk, dv


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *tensors = inputs[:-5]
    ctx.options = inputs[-4:]  # without the number of kept rows
    ctx.save_for_backward(q, k, v, *output, *tensors)


def _autograd_backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.ds_engine.flash4_backward(grad, *ctx.saved_tensors, *ctx.options)
    return (*gradients, *[None] * 10)  # the other outputs are not those of flash4_attention


_forward.register_autograd(_autograd_backward, setup_context=_save_for_backward)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge attention to other keys into `out` [Q, heads, d] and `lse` [heads, Q], in place and in fp32.

    The log-sum-exp of both is that of the exponentials' sum, and each output weighs as much as its part of it.
    """
    if not out.is_cuda:
        total = torch.logaddexp(lse, other_lse)
        share, other_share = ((x - total).exp().T[..., None] for x in (lse, other_lse))
        out.copy_(out.float() * share + other.float() * other_share)
        lse.copy_(total)
        return
    from .flash4_merge import merge_on_gpu

    merge_on_gpu(out, lse, other, other_lse)
