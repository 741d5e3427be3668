"""FlashAttention-4 as an operator: arguments, gradients, graphs. Its kernels need a GPU, so plain torch stands in for
the two functions that run them here; ds_engine_gpu_worker.py runs the real ones."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_engine.model.attention import PackedLayout, packed_attention

HEADS, KV_HEADS, DIM = 4, 2, 8


def segments(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, scale: float, left: int | None) -> Any:
    """For each sequence: its slice, queries, keys and values per query head, and probabilities."""
    groups = q.shape[1] // k.shape[1]
    for a, b in zip(borders.tolist(), borders.tolist()[1:], strict=False):
        seen_LL = torch.ones(b - a, b - a, dtype=torch.bool).tril().triu(-(b - a) if left is None else -left)
        q_hLd, k_hLd, v_hLd = (x[a:b].transpose(0, 1) for x in (q, k, v))
        k_hLd, v_hLd = k_hLd.repeat_interleave(groups, 0), v_hLd.repeat_interleave(groups, 0)
        p_hLL = (q_hLd @ k_hLd.mT * scale).masked_fill(~seen_LL, -torch.inf).softmax(-1)
        yield slice(a, b), q_hLd, k_hLd, v_hLd, p_hLL


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, softmax_scale: float, causal: bool, window_size_left: int | None, return_lse: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    assert causal
    assert return_lse
    assert cu_seqlens_q.equal(cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    out = torch.empty_like(q)
    lse = torch.arange(q.shape[0] * q.shape[1], dtype=torch.float32).reshape(q.shape[1], q.shape[0])
    for part, _, _, v_hLd, p_hLL in segments(q, k, v, cu_seqlens_q, softmax_scale, window_size_left):
        out[part] = (p_hLL @ v_hLd).transpose(0, 1)
    return out, lse, None, None, None


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *, cu_seqlens_q: Tensor,
    softmax_scale: float, window_size_left: int | None, deterministic: bool, **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert not deterministic
    assert lse[-1, -1] == q.shape[0] * q.shape[1] - 1
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    for part, q_hLd, k_hLd, v_hLd, p_hLL in segments(q, k, v, cu_seqlens_q, softmax_scale, window_size_left):
        g_hLd, o_hLd = dout[part].transpose(0, 1), out[part].transpose(0, 1)
        ds_hLL = p_hLL * (g_hLd @ v_hLd.mT - (g_hLd * o_hLd).sum(-1, keepdim=True)) * softmax_scale
        dq[part] = (ds_hLL @ k_hLd).transpose(0, 1)
        for grad, by_head in ((dk, ds_hLL.mT @ q_hLd), (dv, p_hLL.mT @ g_hLd)):
            grad[part] = by_head.unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1)
    return dq, dk, dv


@pytest.fixture(scope="module", autouse=True)
def stand_in() -> Any:
    modules = {name: ModuleType(name) for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")}
    vars(modules["flash_attn.cute.interface"]).update(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        yield


def attend(lengths: list[int], window: int | None, kernel: str, *, compiled: bool = False) -> list[Tensor]:
    """Output and gradients of the inputs, which are used a second time."""
    total = sum(lengths)
    generator = torch.Generator().manual_seed(total)
    q, k, v = (
        torch.randn(1, heads, total, DIM, generator=generator, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    borders = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    packing = PackedLayout(cu_seqlens_S1=borders, lengths=tuple(lengths), max_seqlen=max(lengths), kernel=kernel)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_attention(None, q.sin(), k.cos(), v, None, sliding_window=window, packing=packing)[0]

    if compiled:
        call = torch.compile(call, dynamic=True, fullgraph=True, backend="aot_eager")
    out = call(q, k, v)
    return [out, *torch.autograd.grad(out, (q, k, v), torch.randn(out.shape, generator=generator))]


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), window=st.none() | st.integers(1, 10))
@settings(deadline=None, max_examples=30)
def test_operator_equals_sdpa(lengths: list[int], window: int | None) -> None:
    for ours, expected in zip(attend(lengths, window, "flash4"), attend(lengths, window, "sdpa"), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_operator_in_one_graph(window: int | None) -> None:
    for lengths in ([5, 1, 9], [7, 2, 20, 1]):
        plain = attend(lengths, window, "sdpa")
        for ours, expected in zip(attend(lengths, window, "flash4", compiled=True), plain, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
