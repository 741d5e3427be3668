"""Warp-specialized kernels for Hopper (compute capability 9.0), bf16 and fp16, written in Gluon.

Both kernels are one persistent matrix product ``raw = hidden @ weight^T`` with a different epilogue. A program (one
per multiprocessor) has these roles:

* One producer warp fills ``STAGES`` slots of shared memory through TMA. A slot holds 64 x 64 of hidden for each
  consumer and 256 x 64 of weight, 48 or 56 KiB.
* ``CONSUMERS`` (2 or 3) warpgroups compute 64 rows x 256 columns of the tile each, with 128 accumulator registers per
  thread. All of them read the same weight slot. The product is limited by the power of the chip, and reads through the
  L2 cache take a good part of it: 192 x 256 tiles read 22% less than 128 x 256 tiles for the same arithmetic. With
  three consumers a thread has 160 registers, too few for the widest matrix instruction, so they issue two of half the
  width.

A consumer waits for its matrix instructions before it releases a slot; the other consumers keep the tensor cores busy
meanwhile. The exponentials of a tile take 10 to 20% of the time of its matrix product at ``H = 1024`` and are hidden
the same way: consumers drift apart as far as the slots allow.

Tiles run in groups of ``group_m`` row blocks with rows fastest, so that concurrent programs share a few weight blocks
and row blocks through the L2 cache. There are no atomics, so the result does not depend on timing.

TMA reads rows past ``num_tokens`` and columns past ``vocab`` as zeros. Such columns are set to a large negative logit
before any sum; such rows are never written.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .triton_kernels import ANY_NUMBER_OF_TOKENS
from .types import MARGIN_BITS

PART_M = gl.constexpr(64)  # rows (tokens) of a tile for each consumer
BLOCK_N = gl.constexpr(256)  # columns (vocabulary) of a tile
BLOCK_K = gl.constexpr(64)  # hidden elements of a slot: one 128-byte swizzle row
STORE_N = gl.constexpr(64)  # columns of one store of the backward kernel
NEGATIVE = gl.constexpr(-1.0e30)  # finite, so that 0 * NEGATIVE is 0 and not NaN
MARGIN = gl.constexpr(MARGIN_BITS)


@gluon.jit
def _tile_position(tile, num_m, num_n, group_m):
    """Row block and column block of a tile; rows are fastest within groups of group_m row blocks."""
    per_group = group_m * num_n
    group = tile // per_group
    first_m = group * group_m
    rows = gl.minimum(num_m - first_m, group_m)
    inside = tile - group * per_group
    return first_m + inside % rows, inside // rows


@gluon.jit
def _next_slot(slot, phase, STAGES: gl.constexpr):
    wrapped = slot + 1 == STAGES
    return gl.where(wrapped, 0, slot + 1), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def _producer(pipe, sizes, hidden_desc, weight_desc, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    hidden_smem, weight_smem, full, empty = pipe
    num_m, num_n, num_k, group_m = sizes
    slot = 0
    phase = 1  # do not wait in the first pass over the slots
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        block_m, block_n = _tile_position(tile, num_m, num_n, group_m)
        for k in range(num_k):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, hidden_desc.block_type.nbytes * CONSUMERS + weight_desc.block_type.nbytes)
            column = k * BLOCK_K
            tma.async_copy_global_to_shared(weight_desc, [block_n * BLOCK_N, column], bar, weight_smem.index(slot))
            for part in gl.static_range(CONSUMERS):
                row = (block_m * CONSUMERS + part) * PART_M
                into = hidden_smem.index(CONSUMERS * slot + part)
                tma.async_copy_global_to_shared(hidden_desc, [row, column], bar, into)
            slot, phase = _next_slot(slot, phase, STAGES)


@gluon.jit
def _product(acc, pipe, slot, phase, num_k, PART: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """Raw logits of the 64 x 256 part of a tile that one consumer computes."""
    hidden_smem, weight_smem, full, empty = pipe
    for k in range(num_k):
        mbarrier.wait(full.index(slot), phase)
        acc = warpgroup_mma(
            hidden_smem.index(CONSUMERS * slot + PART), weight_smem.index(slot).permute((1, 0)), acc, use_acc=k > 0,
            is_async=True,
        )  # fmt: skip
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = _next_slot(slot, phase, STAGES)
    return acc, slot, phase


@gluon.constexpr_function
def _accumulator_layout(consumers):
    """Layout of 64 x 256 accumulators over one warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256 if consumers == 2 else 128, 16])


@gluon.jit
def _mask_columns(acc, block_n, vocab, LAYOUT: gl.constexpr):
    """Set columns past the vocabulary (only in the last column block) to NEGATIVE."""
    if (block_n + 1) * BLOCK_N > vocab:
        columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        acc = gl.where((columns < vocab - block_n * BLOCK_N)[None, :], acc, NEGATIVE)
    return acc


@gluon.jit
def _halves(x):
    """Left and right half of the columns, without moving registers."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    return x.reshape([M, 2, N // 2]).permute(0, 2, 1).split()


@gluon.jit
def _store_piece(piece, out_desc, staging, row, column):
    """Store one 64 x 64 piece through shared memory; with two buffers, at most one earlier store may be pending."""
    tma.store_wait(1)
    staging.store(piece)
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, column], staging)


@gluon.jit
def _store_tile(tile, out_desc, staging, row, column, PART: gl.constexpr):
    """Store a consumer's 64 x 256 part of a tile, already in the output dtype, in four pieces."""
    left, right = _halves(tile)
    piece0, piece1 = _halves(left)
    piece2, piece3 = _halves(right)
    _store_piece(piece0, out_desc, staging.index(2 * PART), row, column)
    _store_piece(piece1, out_desc, staging.index(2 * PART + 1), row, column + STORE_N)
    _store_piece(piece2, out_desc, staging.index(2 * PART), row, column + 2 * STORE_N)
    _store_piece(piece3, out_desc, staging.index(2 * PART + 1), row, column + 3 * STORE_N)


@gluon.jit
def _stats_consumer(
    pipe, sizes, args, KEEP: gl.constexpr, PART: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    staging, share_desc, reference_ptr, lse_ptr, entropy_ptr, num_tokens, vocab, scale = args
    LAYOUT: gl.constexpr = _accumulator_layout(CONSUMERS)
    num_m, num_n, num_k, group_m = sizes
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        block_m, block_n = _tile_position(tile, num_m, num_n, group_m)
        acc = gl.zeros((PART_M, BLOCK_N), gl.float32, layout=LAYOUT)
        acc, slot, phase = _product(acc, pipe, slot, phase, num_k, PART, CONSUMERS, STAGES)
        acc = _mask_columns(acc, block_n, vocab, LAYOUT)
        # In bits: t = z * log2(e) = scale * raw. Within the tile lse = m + log2(s), entropy = log2(s) - w / s.
        peak = gl.max(acc, axis=1) * scale
        x = acc * scale - peak[:, None]
        e = gl.exp2(x)
        s = gl.sum(e, axis=1)
        w = gl.sum(e * x, axis=1)
        log_s = gl.log2(s)
        first_row = (block_m * CONSUMERS + PART) * PART_M
        rows = first_row + gl.arange(0, PART_M, layout=gl.SliceLayout(1, LAYOUT))
        offsets = block_n.to(gl.int64) * num_tokens + rows
        gl.store(lse_ptr + offsets, peak + log_s, mask=rows < num_tokens)
        gl.store(entropy_ptr + offsets, log_s - w / s, mask=rows < num_tokens)
        if KEEP:
            reference = gl.load(reference_ptr + rows, mask=rows < num_tokens, other=0.0)
            base = gl.where(peak + log_s > reference + MARGIN, peak + log_s, reference)
            share = e * gl.exp2(peak - base)[:, None]
            _store_tile(share.to(share_desc.dtype), share_desc, staging, first_row, block_n * BLOCK_N, PART)
    if KEEP:
        tma.store_wait(0)


@gluon.jit
def _gradient_consumer(
    pipe, sizes, args, HAS_BETA: gl.constexpr, PART: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    staging, out_desc, lse_ptr, alpha_ptr, beta_ptr, num_tokens, scale = args
    LAYOUT: gl.constexpr = _accumulator_layout(CONSUMERS)
    num_m, num_n, num_k, group_m = sizes
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        block_m, block_n = _tile_position(tile, num_m, num_n, group_m)
        first_row = (block_m * CONSUMERS + PART) * PART_M
        rows = first_row + gl.arange(0, PART_M, layout=gl.SliceLayout(1, LAYOUT))
        acc = gl.zeros((PART_M, BLOCK_N), gl.float32, layout=LAYOUT)
        acc, slot, phase = _product(acc, pipe, slot, phase, num_k, PART, CONSUMERS, STAGES)
        lse = gl.load(lse_ptr + rows, mask=rows < num_tokens, other=0.0)
        alpha = gl.load(alpha_ptr + rows, mask=rows < num_tokens, other=0.0)
        p = gl.exp2(acc * scale - lse[:, None])
        if HAS_BETA:
            beta = gl.load(beta_ptr + rows, mask=rows < num_tokens, other=0.0)
            da = p * (acc * beta[:, None] + alpha[:, None])
        else:
            da = p * alpha[:, None]
        _store_tile(da.to(out_desc.dtype), out_desc, staging, first_row, block_n * BLOCK_N, PART)
    tma.store_wait(0)


@gluon.jit
def _make_pipe(hidden_desc, weight_desc, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """Allocate the slots of hidden and weight, and the barriers "slot is full" and "slot is empty"."""
    DTYPE: gl.constexpr = hidden_desc.dtype
    hidden_smem = gl.allocate_shared_memory(DTYPE, [CONSUMERS * STAGES, PART_M, BLOCK_K], hidden_desc.layout)
    weight_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    return hidden_smem, weight_smem, full, empty


@gluon.jit(**ANY_NUMBER_OF_TOKENS)
def stats_kernel(
    hidden_desc, weight_desc, share_desc, reference_ptr, lse_ptr, entropy_ptr, num_tokens, vocab, hidden_size, scale,
    group_m, KEEP: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Per tile and row: log2-sum-exp2 and entropy in bits of ``t = scale * hidden @ weight^T``; ``[num_n, T]`` each.

    ``scale`` is log2(e) / temperature. With KEEP the tiles also store ``2^(t - base)``, see triton_kernels.share_base.
    """
    pipe = _make_pipe(hidden_desc, weight_desc, CONSUMERS, STAGES)
    staging = pipe[0]  # unused without KEEP
    if KEEP:
        staging = gl.allocate_shared_memory(share_desc.dtype, [2 * CONSUMERS, PART_M, STORE_N], share_desc.layout)
    sizes = (gl.cdiv(num_tokens, CONSUMERS * PART_M), gl.cdiv(vocab, BLOCK_N), gl.cdiv(hidden_size, BLOCK_K), group_m)
    args = (staging, share_desc, reference_ptr, lse_ptr, entropy_ptr, num_tokens, vocab, scale)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_stats_consumer, (pipe, sizes, args, KEEP, gl.constexpr(0), CONSUMERS, STAGES)),
                (_stats_consumer, (pipe, sizes, args, KEEP, gl.constexpr(1), CONSUMERS, STAGES)),
                (_producer, (pipe, sizes, hidden_desc, weight_desc, CONSUMERS, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_stats_consumer, (pipe, sizes, args, KEEP, gl.constexpr(0), CONSUMERS, STAGES)),
                (_stats_consumer, (pipe, sizes, args, KEEP, gl.constexpr(1), CONSUMERS, STAGES)),
                (_stats_consumer, (pipe, sizes, args, KEEP, gl.constexpr(2), CONSUMERS, STAGES)),
                (_producer, (pipe, sizes, hidden_desc, weight_desc, CONSUMERS, STAGES)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


@gluon.jit(**ANY_NUMBER_OF_TOKENS)
def gradient_kernel(
    hidden_desc, weight_desc, out_desc, lse_ptr, alpha_ptr, beta_ptr, num_tokens, vocab, hidden_size, scale, group_m,
    HAS_BETA: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``out = 2^(scale * raw - lse) * (alpha + beta * raw)`` in the input dtype: da of types.py except for the targets.

    ``lse`` is in bits; ``alpha`` and ``beta`` contain the incoming gradients, the temperature and any loss scale.
    """
    CONSUMERS: gl.constexpr = 3
    pipe = _make_pipe(hidden_desc, weight_desc, CONSUMERS, STAGES)
    staging = gl.allocate_shared_memory(out_desc.dtype, [2 * CONSUMERS, PART_M, STORE_N], out_desc.layout)
    sizes = (gl.cdiv(num_tokens, CONSUMERS * PART_M), gl.cdiv(vocab, BLOCK_N), gl.cdiv(hidden_size, BLOCK_K), group_m)
    args = (staging, out_desc, lse_ptr, alpha_ptr, beta_ptr, num_tokens, scale)
    gl.warp_specialize(
        [
            (_gradient_consumer, (pipe, sizes, args, HAS_BETA, gl.constexpr(0), CONSUMERS, STAGES)),
            (_gradient_consumer, (pipe, sizes, args, HAS_BETA, gl.constexpr(1), CONSUMERS, STAGES)),
            (_gradient_consumer, (pipe, sizes, args, HAS_BETA, gl.constexpr(2), CONSUMERS, STAGES)),
            (_producer, (pipe, sizes, hidden_desc, weight_desc, CONSUMERS, STAGES)),
        ],
        [4, 4, 1],
        [160, 160, 24],
    )
