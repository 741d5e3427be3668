"""FlashAttention-4 as an operator: arguments, gradients, graphs. Its kernels need a GPU, so plain torch stands in for
the two functions that run them here; ds_engine_gpu_worker.py runs the real ones."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ds_engine_trees import draw_tree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from ds_engine.model import flash4, prefix_tree
from ds_engine.model.attention import packed_attention, packed_layout
from ds_engine.model.matching import MatchedAttention
from plinth_testing import run_under_the_interpreter

HEADS, KV_HEADS, DIM = 4, 2, 8


def segments(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
    """For each sequence: the slices of queries and keys, these and values per query head, and scores, which are -inf
    where a query does not see a key. Causal from the bottom right."""
    groups = q.shape[1] // k.shape[1]
    q_borders, k_borders = (options[f"cu_seqlens_{x}"].tolist() for x in "qk")
    assert options["max_seqlen_q"] >= max(b - a for a, b in pairwise(q_borders))
    assert options["max_seqlen_k"] == max(b - a for a, b in pairwise(k_borders))
    for (a, b), (c, d) in zip(pairwise(q_borders), pairwise(k_borders), strict=True):
        seen_LM = torch.ones(b - a, d - c, dtype=torch.bool)
        if options["causal"]:
            left = options["window_size_left"]
            seen_LM = seen_LM.tril(d - c - b + a).triu(-(d + b) if left is None else d - c - b + a - left)
        q_hLd, k_hMd, v_hMd = q[a:b].transpose(0, 1), *(x[c:d].transpose(0, 1) for x in (k, v))
        k_hMd, v_hMd = k_hMd.repeat_interleave(groups, 0), v_hMd.repeat_interleave(groups, 0)
        scores_hLM = (q_hLd @ k_hMd.mT * options["softmax_scale"]).masked_fill(~seen_LM, -torch.inf)
        yield slice(a, b), slice(c, d), q_hLd, k_hMd, v_hMd, scores_hLM


def forward(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Any) -> tuple[Tensor | None, ...]:
    assert return_lse
    assert options["max_seqlen_q"] > 256, "short sequences compile the kernel of one tile"
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    for part, _, _, _, v_hMd, scores_hLM in segments(q, k, v, options):
        out[part] = (scores_hLM.softmax(-1) @ v_hMd).transpose(0, 1)
        lse[:, part] = scores_hLM.logsumexp(-1)
    return out, lse, None, None, None


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *, deterministic: bool,
    dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None, **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Probabilities are those of `lse`, not of the scores alone, as in the kernel."""
    assert not deterministic
    dq, dk, dv = (torch.empty_like(x) if out is None else out for x, out in ((q, dq), (k, dk), (v, dv)))
    for part, keys, q_hLd, k_hMd, v_hMd, scores_hLM in segments(q, k, v, options):
        p_hLM = (scores_hLM - lse[:, part, None]).exp()
        g_hLd, o_hLd = dout[part].transpose(0, 1), out[part].transpose(0, 1)
        ds_hLM = p_hLM * (g_hLd @ v_hMd.mT - (g_hLd * o_hLd).sum(-1, keepdim=True)) * options["softmax_scale"]
        dq[part] = (ds_hLM @ k_hMd).transpose(0, 1)
        for grad, by_head in ((dk, ds_hLM.mT @ q_hLd), (dv, p_hLM.mT @ g_hLd)):
            grad[keys] = by_head.unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1)
    return dq, dk, dv


MERGE = """
import torch
from ds_engine.model.flash4 import merge
from ds_engine.model.flash4_merge import gather_on_gpu, merge_on_gpu, sum_on_gpu
from ds_engine.model.prefix_tree import gather_paths, rows_by_source, sum_sources

generator = torch.Generator().manual_seed(0)
for queries, heads, dim, dtype in ((37, 3, 16, torch.float32), (5, 2, 24, torch.bfloat16)):
    out, other = (torch.randn(queries + 4, heads, dim, generator=generator).to(dtype) for _ in range(2))
    lse, other_lse = (20 * torch.randn(heads, queries + 4, generator=generator) for _ in range(2))
    parts = [[x.clone() for x in (out, lse)] for _ in range(2)]
    for function, (first, second) in zip((merge_on_gpu, merge), parts):
        function(first[4:], second[:, 4:], other[4:], other_lse[:, 4:])
    for ours, expected in zip(*parts):
        torch.testing.assert_close(ours, expected)

for num_rows, shape, dtype in ((50, (2, 300), torch.float32), (7, (3, 24), torch.bfloat16)):
    rows = torch.randint(num_rows, (99,), generator=generator)
    x = torch.randn(shape[0], num_rows, shape[1], generator=generator).to(dtype).transpose(0, 1)
    sources = rows_by_source(rows, num_rows + 1)  # nothing reads the last one
    smaller = x[..., : shape[1] // 2]  # values of latent attention
    for ours, expected in zip(gather_on_gpu(x, smaller, rows), gather_paths(x, smaller, rows)):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    for copies in (1, 2):
        grad = x[:, :1].expand(-1, 2 * copies, -1)[rows]
        torch.testing.assert_close(sum_on_gpu(grad, *sources, copies), sum_sources(grad, *sources, copies))
"""


def test_interpreted_kernels_equal_torch() -> None:
    run_under_the_interpreter(MERGE)


@pytest.fixture(scope="module", autouse=True)
def stand_in() -> Any:
    modules = {name: ModuleType(name) for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")}
    vars(modules["flash_attn.cute.interface"]).update(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        yield


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, starts: Tensor, lengths: Tensor, scale: float, longest: int, *,
    lse: Tensor,
) -> Tensor:  # fmt: skip
    """A server's: keys by a table of blocks of one token."""
    rows = torch.cat([row[:length] for row, length in zip(table.long(), lengths, strict=True)])
    options = {"cu_seqlens_q": starts, "max_seqlen_q": longest, "max_seqlen_k": int(lengths.max()), "causal": True}
    options |= {"cu_seqlens_k": torch.cat((lengths.new_zeros(1), lengths.cumsum(0))), "window_size_left": None}
    options["max_seqlen_q"] = max(longest, 257)
    out, log_sums, *_ = forward(q, k[rows, :, 0], v[rows, :, 0], return_lse=True, softmax_scale=scale, **options)
    lse.copy_(log_sums)
    return out


def attend(
    lengths: list[int],
    window: int | None,
    kernel: str,
    *,
    parents: list[int] | None = None,
    keeps_paths: bool = False,
    compiled: bool = False,
    matched: bool = False,
) -> list[Tensor]:
    """Output and gradients of the inputs, which are used a second time."""
    total = sum(lengths)
    generator = torch.Generator().manual_seed(total)
    q, k, v = (
        torch.randn(1, heads, total, DIM, generator=generator, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    packing = packed_layout(
        lengths, device=torch.device("cpu"), kernel=kernel, parents=parents, keeps_paths=keeps_paths
    )
    if matched:
        operations: Any = SimpleNamespace(attention=paged_attention)
        packing = replace(packing, matched=MatchedAttention.make(packing, operations))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_attention(None, q.sin(), k.cos(), v, None, sliding_window=window, packing=packing)[0]

    if compiled:
        call = torch.compile(call, dynamic=True, fullgraph=True, backend="aot_eager")
    out = call(q, k, v)
    return [out, *torch.autograd.grad(out, (q, k, v), torch.randn(out.shape, generator=generator))]


def check_equal(lengths: list[int], window: int | None, **options: Any) -> None:
    ours = attend(lengths, window, "flash4", **options)
    expected = attend(lengths, window, "sdpa", parents=options.get("parents"))
    for result, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), window=st.none() | st.integers(1, 10))
@settings(deadline=None, max_examples=30)
def test_operator_equals_sdpa(lengths: list[int], window: int | None) -> None:
    check_equal(lengths, window)


@given(
    data=st.data(),
    window=st.none() | st.integers(1, 20),
    limits=st.tuples(*[st.sampled_from([0.0, 1.0, 1e9])] * 2),
    keeps_paths=st.booleans(),
)
@settings(deadline=None, max_examples=80)
def test_operator_equals_sdpa_with_shared_prefixes(
    data: st.DataObject, window: int | None, limits: tuple[float, float], keeps_paths: bool
) -> None:
    """Any tree, also one whose nodes with children are not contiguous; each pass gathers paths or reads in place."""
    parents = draw_tree(data)
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=len(parents), max_size=len(parents)))
    with patch.multiple(prefix_tree, FORWARD_ROWS=limits[0], BACKWARD_ROWS=limits[1], MOST_PATH_ROWS=1e9):
        check_equal(lengths, window, parents=parents, keeps_paths=keeps_paths)
        check_equal(lengths, None, parents=parents, keeps_paths=keeps_paths, matched=True)


def test_kept_paths_are_not_gathered_again_and_give_the_same_bits() -> None:
    tree: dict[str, Any] = {"lengths": [9, 5, 4, 3], "window": None, "kernel": "flash4", "parents": [-1, 0, 0, 1]}
    results = []
    for keeps_paths, limit, num_gathers in ((True, 1e9, 1), (False, 1e9, 2), (True, 0.0, 0)):
        limits = {"FORWARD_ROWS": limit, "BACKWARD_ROWS": limit}
        gather = patch.object(flash4, "gather_paths", wraps=prefix_tree.gather_paths)
        with patch.multiple(prefix_tree, **limits), gather as gathered:
            results.append(attend(**tree, keeps_paths=keeps_paths))
        assert gathered.call_count == num_gathers
    assert all(map(torch.equal, *results[:2]))


def test_short_prefixes_are_gathered_and_long_ones_read_in_place() -> None:
    """Of eight responses of 512 tokens, with 2 and with 7 query heads per key/value head."""
    passes = {}
    for prompt in (248, 1024, 4096):
        parents = [-1, *[0] * 8]
        packing = packed_layout([prompt, *[512] * 8], device=torch.device("cpu"), kernel="flash4", parents=parents)
        assert packing.crossings is not None
        gathering = prefix_tree.Gathering(*packing.crossings.table_C[0].tolist())
        passes[prompt] = [gathering.in_forward(8, 4), gathering.in_forward(28, 4), gathering.in_backward()]
    assert passes == {248: [True, True, True], 1024: [True, True, True], 4096: [False, False, False]}


def test_operator_in_one_graph() -> None:
    for lengths in ([5, 1, 9], [7, 2, 20, 1]):
        check_equal(lengths, 3, compiled=True)
        parents = [-1, *[0] * (len(lengths) - 1)]
        check_equal([20, *lengths[1:]], None, compiled=True, parents=parents, keeps_paths=len(lengths) > 3)


def test_one_graph_serves_rows_with_and_without_shared_prefixes() -> None:
    """The first step is compiled ahead without them."""
    keeps: list[bool] = []
    torch._dynamo.reset()
    counter = CompileCounter()
    call = torch.compile(packed_attention, dynamic=True, fullgraph=True, backend=counter)
    for lengths, parents in (
        ([4, 6], None),
        ([5, 3, 8], [-1, 0, 0]),
        ([2, 3, 4, 5, 6], [-1, -1, 0, 1, 2]),
        ([3], None),
    ):
        q, k, v = (torch.randn(1, heads, sum(lengths), DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        packing = packed_layout(
            lengths, device=torch.device("cpu"), kernel="flash4", parents=parents, keeps_paths=len(lengths) > 3
        )
        assert packing.crossings is not None
        keeps.append(packing.crossings.num_kept == 31)
        call(None, q, k, v, None, packing=packing)
    assert counter.frame_count == 1
    assert keeps == [False, False, True, False]
