"""Attention of decoding steps, for samples of one prompt together.

In a rollout, several samples continue one prompt, and vLLM keeps the prompt's keys and values once. FlashAttention 3
reads them for every sample, and computes tiles of 64 or 128 queries of which a decoding step has two or seven. Here one
program of the GPU computes neighboring requests together: it reads blocks of the KV cache that they share once, and its
tiles have 16 queries. How the work is divided depends on the number of requests alone, so CUDA graphs can contain it.
Memory is read as fast as there are programs at once to ask for it: their number decides how many requests one computes.
Online softmax over tiles of tokens: FlashAttention-2 (https://arxiv.org/abs/2307.08691), algorithm 1. The tokens of a
request are not divided among programs, so with few requests most of the GPU would be idle: vLLM computes these steps.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from plinth_base.fence import Replace

_ROWS = 16
"""Queries of a tile, the smallest that tensor cores take."""
_TILE = 64
"""Tokens of a tile."""
_TABLE_CHUNK = 64
"""Blocks that are compared at once."""
_AT_ONCE = 4
"""Programs that a streaming multiprocessor of a Hopper GPU runs at once: of four warps, `_REGISTERS` for a thread."""
_REGISTERS = 128
"""The most of a thread. A version with 152 ran three programs at once and took 1.35 times as long (256 requests)."""
_FEWEST = 2.9
"""Steps with fewer programs per multiprocessor, counted with one request each, are left to vLLM: FlashAttention 3 was
slower at 2.9 and faster at 1.9."""
_CAPABILITY = (9, 0)
"""Compute capability of the GPUs that it was timed on. Others may be faster with what vLLM has for them."""
_WIDTHS = (64, 128)
"""Head sizes that the kernel was tried with."""
_CLOSE = 2e-2
"""Largest difference from FlashAttention, in units of a request's largest value: both round to 16 bits."""


@triton.jit(do_not_specialize=["num_requests"])  # it would be compiled for each number of requests
def _attend_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, scale, num_requests,
    q_row, q_head, out_row, out_head, k_block, k_token, k_head, v_block, v_token, v_head, table_row,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, PER_HEAD: tl.constexpr, TOGETHER: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One key head of TOGETHER neighboring requests: first the tiles that they share, then each request's own."""
    head, first = tl.program_id(0), tl.program_id(1) * TOGETHER
    near = tl.arange(0, TOGETHER)
    lengths = tl.load(lengths_ptr + first + near, mask=first + near < num_requests, other=0)
    shared = 0
    if TOGETHER > 1:
        shortest = tl.min(tl.where(lengths > 0, lengths, 2147483647), axis=0)
        whole_blocks = tl.where(shortest == 2147483647, 0, shortest // BLOCK)
        common, alike = 0, True
        while alike:
            blocks = common + tl.arange(0, CHUNK)
            there = blocks < whole_blocks
            of_first = tl.load(table_ptr + first.to(tl.int64) * table_row + blocks, mask=there, other=-1)
            of_all = tl.load(
                table_ptr + (first + near).to(tl.int64)[:, None] * table_row + blocks[None, :],
                mask=there[None, :] & (lengths > 0)[:, None],
                other=-1,
            )
            differs = ((of_all != of_first[None, :]) & (lengths > 0)[:, None]) | (blocks >= whole_blocks)[None, :]
            same = tl.min(tl.min(tl.where(differs, tl.arange(0, CHUNK)[None, :], CHUNK), axis=1), axis=0)
            common += same
            alike = same == CHUNK
        shared = common * BLOCK // TILE

    rows = tl.arange(0, ROWS)
    member = rows // PER_HEAD
    request = (first + member).to(tl.int64)
    query = head * PER_HEAD + rows % PER_HEAD
    real = (member < TOGETHER) & (request < num_requests)
    has_tokens = tl.load(lengths_ptr + request, mask=real, other=0) > 0
    columns = tl.arange(0, WIDTH)
    q = tl.load(
        q_ptr + request[:, None] * q_row + query[:, None] * q_head + columns[None, :], mask=real[:, None], other=0.0
    )
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, WIDTH], tl.float32)
    tokens = tl.arange(0, TILE)
    for part in range(TOGETHER + 1):  # not unrolled: the compiler would spend more registers on it
        which = tl.maximum(part - 1, 0)
        length = tl.where(part == 0, shared * TILE, tl.sum(tl.where(near == which, lengths, 0), axis=0))
        begin, end = tl.where(part == 0, 0, shared), (length + TILE - 1) // TILE
        asks = ((part == 0) | (member == which)) & has_tokens
        row_ptr = table_ptr + (first + which).to(tl.int64) * table_row
        for number in tl.range(begin, end, num_stages=STAGES):
            position = number * TILE + tokens
            there = position < length
            block = tl.load(row_ptr + position // BLOCK, mask=there, other=0).to(tl.int64)
            place = position % BLOCK
            key = tl.load(k_ptr + (block * k_block + place * k_token + head * k_head)[None, :] + columns[:, None])
            value = tl.load(
                v_ptr + (block * v_block + place * v_token + head * v_head)[:, None] + columns[None, :],
                mask=there[:, None],
                other=0.0,
            )
            scores = tl.dot(q, key) * scale
            scores = tl.where(asks[:, None] & there[None, :], scores, float("-inf"))
            top = tl.maximum(largest, tl.max(scores, axis=1))
            shift = tl.where(top == float("-inf"), 0.0, top)  # a row that has seen none of its tokens
            weights = tl.exp2(scores - shift[:, None])
            fade = tl.exp2(largest - shift)
            total = total * fade + tl.sum(weights, axis=1)
            values = tl.dot(weights.to(value.dtype), value, values * fade[:, None])
            largest = top
    values = values / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out_ptr + request[:, None] * out_row + query[:, None] * out_head + columns[None, :],
        values.to(out_ptr.dtype.element_ty),
        mask=real[:, None],
    )


def decode(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    together: int,
    tile: int = _TILE,
) -> Tensor:
    """Attention of one new token per request over its tokens in a paged KV cache.

    A value that is not finite, in the tokens of one request, also reaches the other requests of its program.

    Args:
        out: [requests, heads, width], written; rows of requests without tokens become zero.
        q: [requests, heads, width], float16 or bfloat16, its last dimension contiguous, as that of `out`, `k` and `v`.
        k: [blocks, tokens of a block, key heads, width]; heads is a multiple of key heads.
        v: like `k`.
        table: [requests, most blocks] int32, the blocks of each request in order.
        lengths: [requests] int32, tokens of each request, the new one included.
        scale: factor of the scores before the softmax.
        together: neighboring requests of one program, 1, 2 or 4, with at most 16 queries of a key head.
        tile: tokens of a tile.
    """
    requests, heads, width = q.shape
    block, key_heads = k.shape[1:3]
    _attend_kernel[(key_heads, triton.cdiv(requests, together))](
        out, q, k, v, table, lengths, scale * math.log2(math.e), requests,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2), table.stride(0),
        BLOCK=block, WIDTH=width, PER_HEAD=heads // key_heads, TOGETHER=together, TILE=tile,
        ROWS=_ROWS, CHUNK=_TABLE_CHUNK, STAGES=2, num_warps=4, maxnreg=_REGISTERS,
    )  # fmt: skip
    return out


def requests_together(requests: int, heads: int, key_heads: int, processors: int) -> int:
    """Requests of one program of `decode`; 0: too few for a GPU with so many streaming multiprocessors.

    As few as let all programs run at once, so that they keep as much of the GPU busy as they can; with more requests
    than that, as many as a tile of queries holds.
    """
    choices = _choices(heads, key_heads)
    programs = {n: key_heads * -(-requests // n) for n in choices}
    if not choices or programs[1] < _FEWEST * processors:
        return 0
    return next((n for n in choices if programs[n] <= _AT_ONCE * processors), choices[-1])


def _choices(heads: int, key_heads: int) -> list[int]:
    """Numbers of requests whose queries have room in a tile."""
    return [n for n in (1, 2, 4) if n * (heads // key_heads) <= _ROWS]


def attend_together(replace: Replace) -> None:
    """Compute decoding steps of plain attention layers with `decode`, if they have requests enough to fill the GPU.

    The first such step computes a small random case in both ways. If they differ, or `decode` cannot compute it, or the
    GPU is not one that it was timed on, vLLM's way is used from then on and one line says so.
    """
    from vllm.config import get_current_vllm_config_or_none
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    stock, create = FlashAttentionImpl.forward, FlashAttentionImpl.__init__
    compared = False
    processors: int | None = None

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        config = get_current_vllm_config_or_none()
        self.plinth_compilation = config and config.compilation_config  # vLLM chooses the graphs later

    def forward(
        self: Any, layer: Any, query: Tensor, key: Any, value: Any, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, output_scale: Any = None, output_block_scale: Any = None,
    ) -> Any:  # fmt: skip
        nonlocal compared, processors
        step = attn_metadata
        if (
            step is None
            or step.max_query_len != 1
            or output_scale is not None
            or output_block_scale is not None
            or not _is_plain(self, query, kv_cache, step)
        ):
            return stock(
                self, layer, query, key, value, kv_cache, step, output, output_scale, output_block_scale
            )  # fmt: skip
        if processors is None:
            gpu = torch.cuda.get_device_properties(query.device)
            processors = gpu.multi_processor_count
            if (gpu.major, gpu.minor) != _CAPABILITY:
                give_up(f"it was timed on compute capability {_CAPABILITY}, and this GPU has {(gpu.major, gpu.minor)}")
                return stock(self, layer, query, key, value, kv_cache, step, output)
        together = requests_together(step.num_actual_tokens, self.num_heads, self.num_kv_heads, processors)
        if not together:
            return stock(self, layer, query, key, value, kv_cache, step, output)
        if not compared:
            if torch.cuda.is_current_stream_capturing():  # a kernel is not compiled during a capture
                return stock(self, layer, query, key, value, kv_cache, step, output)
            compared = True
            if problem := _problem(self, layer, query, kv_cache, step, stock):
                give_up(problem)
                return stock(self, layer, query, key, value, kv_cache, step, output)
        _decode(self, query, kv_cache, step, output, together)
        return output

    def give_up(why: str) -> None:
        print(f"attention of decoding steps: vLLM's own path is used: {why}", flush=True)
        restore_forward()

    restore_forward = replace(FlashAttentionImpl, forward=forward)
    replace(FlashAttentionImpl, __init__=init)


def _decode(layer: Any, query: Tensor, kv_cache: Tensor, step: Any, output: Tensor, together: int) -> None:
    stored = kv_cache.transpose(1, 2)
    keys, values = stored[..., : layer.head_size], stored[..., layer.head_size :]
    requests = step.num_actual_tokens
    decode(
        output[:requests], query[:requests], keys, values, step.block_table, step.seq_lens, layer.scale,
        together=together,
    )  # fmt: skip


def _is_plain(layer: Any, query: Tensor, kv_cache: Tensor, step: Any) -> bool:
    """True if a decoding step asks for softmax(scale QK^T)V over all tokens of each request, in 16 bits."""
    unlimited = (None, (-1, -1))
    return (
        layer.attn_type == "decoder"
        and layer.head_size in _WIDTHS
        and layer.num_heads // layer.num_kv_heads <= _ROWS
        and query.dtype in (torch.float16, torch.bfloat16)
        and kv_cache.dtype == query.dtype
        and kv_cache.shape[1:2] + kv_cache.shape[3:] == (layer.num_kv_heads, 2 * layer.head_size)
        and kv_cache.stride(-1) == 1
        and layer.alibi_slopes is None
        and not layer.logits_soft_cap
        and layer.sinks is None
        and layer.sliding_window in unlimited
        and getattr(step, "sliding_window", None) in unlimited  # newer versions have it in the layer alone
        and step.causal is True
        and step.dcp_context_kv_lens is None
        and step.rswa_prefix_lens is None
        and getattr(step, "mm_prefix_range_tensor", None) is None
        and getattr(step, "mm_prefix_query_range_tensor", None) is None
        and not getattr(step, "use_cascade", False)
        and step.num_actual_tokens == step.block_table.shape[0] == step.seq_lens.shape[0]
        and _graphs_of_decoding(layer)
    )


def _graphs_of_decoding(layer: Any) -> bool:
    """True if CUDA graphs of decoding steps compute nothing else.

    With cudagraph_mode=FULL, vLLM 0.26 captures a graph as a decoding step and replays it for steps with prompts.
    """
    compilation = getattr(layer, "plinth_compilation", None)
    mode = compilation and compilation.cudagraph_mode
    return mode is not None and mode.mixed_mode().name != "FULL"


def _problem(layer: Any, module: Any, query: Tensor, kv_cache: Tensor, step: Any, stock: Callable[..., Any]) -> str:
    """Difference from vLLM's attention on a random case, or the error; empty if both agree."""
    try:
        block = kv_cache.shape[2]
        shared = 1 + -(-2 * _TILE // block)  # blocks of a prompt, two whole tiles at least
        most = shared + 3
        lengths = [most * block, most * block - 3, (shared + 1) * block + 1, (shared + 1) * block]
        lengths += [1, block, 2 * block - 1]
        blocks = 1 + most * len(lengths)
        # Not the process's generator: it samples tokens, and must do so alike on all GPUs of a server.
        generator = torch.Generator(query.device).manual_seed(0)
        cache = torch.empty_strided(
            (blocks, *kv_cache.shape[1:]), kv_cache.stride(), dtype=kv_cache.dtype, device=kv_cache.device
        ).normal_(generator=generator)
        table = 1 + torch.randperm(blocks - 1, generator=generator, device=query.device)
        table = table.to(torch.int32).view(len(lengths), most)
        table[1:4, :shared] = table[0, :shared].clone()
        shape = (len(lengths), layer.num_heads, layer.head_size)
        queries = torch.empty(shape, dtype=query.dtype, device=query.device).normal_(generator=generator)
        ints: Any = {"dtype": torch.int32, "device": query.device}
        case = dataclasses.replace(
            step,
            num_actual_tokens=len(lengths),
            query_start_loc=torch.arange(len(lengths) + 1, **ints),
            max_seq_len=max(lengths),
            seq_lens=torch.tensor(lengths, **ints),
            block_table=table,
            scheduler_metadata=None,
            max_num_splits=0,
        )
        expected = torch.zeros_like(queries)
        stock(layer, module, queries, None, None, cache, case, expected)
        for together in _choices(layer.num_heads, layer.num_kv_heads):
            computed = torch.zeros_like(queries)  # else rows that are not written would keep the last result
            _decode(layer, queries, cache, case, computed, together)
            differences, sizes = (computed.float() - expected.float()).abs(), expected.float().abs()
            error = (differences.amax((1, 2)) / sizes.amax((1, 2))).max().item()  # of many tokens, outputs are small
            if not error < _CLOSE:
                return f"outputs differ by {error:.1e} of a request's largest, {together} requests together"
    except Exception as error:  # of another Triton's compiler, for example
        return f"{type(error).__name__}: {error}"
    return ""
