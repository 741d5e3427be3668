"""Warp-specialised kernels for Hopper (compute capability 9.0), bf16 and fp16, written in Gluon.

Both kernels are one persistent matrix product ``raw = hidden @ weight^T`` with a different last step. A program (one
per multiprocessor) has three roles:

* a producer warp keeps ``STAGES`` slots of shared memory full through the bulk tensor copy engine (TMA); a slot holds
  128 x 64 of hidden and 256 x 64 of weight, 48 KiB;
* two consumer warpgroups each own 64 rows x 256 columns of the 128 x 256 tile: 128 accumulator registers a thread.
  Both read the same weight slot, so a tile costs 3/5 of the traffic of two tiles of their own.

The exponentials of a tile take 10 to 20% of the time of its matrix product at ``H = 1024``. They are hidden behind the
other consumer's product: the second consumer starts ``LAG`` slots late and stays that far behind, so that while one is
in its last step the other has the tensor cores for itself. What the lag takes from the ``STAGES`` slots is missing for
prefetching.

Tiles go in groups of ``GROUP_M`` row blocks with rows fastest, so the programs running at one time share a few weight
blocks and row blocks through the L2 cache. There are no atomics: the result does not depend on timing.

Rows past ``num_tokens`` and columns past ``vocab`` are read as zeros by the copy engine; such columns are set to a
large negative logit before any sum, such rows are never written.
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

BLOCK_M = gl.constexpr(128)  # rows (tokens) of a tile, half for each consumer
HALF_M = gl.constexpr(64)
BLOCK_N = gl.constexpr(256)  # columns (vocabulary) of a tile
BLOCK_K = gl.constexpr(64)  # hidden elements of a slot: one 128-byte swizzle row
STORE_N = gl.constexpr(64)  # columns of one store of the backward kernel
NEGATIVE = gl.constexpr(-1.0e30)  # finite, so that 0 * NEGATIVE is 0 and not NaN


@gluon.jit
def _tile_position(tile, num_m, num_n, GROUP_M: gl.constexpr):
    """Row block and column block of a tile; rows fastest inside groups of GROUP_M row blocks."""
    per_group = GROUP_M * num_n
    group = tile // per_group
    first_m = group * GROUP_M
    rows = gl.minimum(num_m - first_m, GROUP_M)
    inside = tile - group * per_group
    return first_m + inside % rows, inside // rows


@gluon.jit
def _producer(
    hidden_desc, weight_desc, hidden_smem, weight_smem, full, empty, num_m, num_n, num_k, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    slot = 0
    phase = 1  # the first pass over the slots must not wait
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        block_m, block_n = _tile_position(tile, num_m, num_n, GROUP_M)
        for k in range(num_k):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, hidden_desc.block_type.nbytes * 2 + weight_desc.block_type.nbytes)
            column = k * BLOCK_K
            tma.async_copy_global_to_shared(hidden_desc, [block_m * BLOCK_M, column], bar, hidden_smem.index(2 * slot))
            tma.async_copy_global_to_shared(weight_desc, [block_n * BLOCK_N, column], bar, weight_smem.index(slot))
            tma.async_copy_global_to_shared(
                hidden_desc, [block_m * BLOCK_M + HALF_M, column], bar, hidden_smem.index(2 * slot + 1)
            )
            slot += 1
            wrapped = slot == STAGES
            slot = gl.where(wrapped, 0, slot)
            phase = gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def _product(
    acc, hidden_smem, weight_smem, full, empty, lag, lag_at, slot, phase, num_k, HALF: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Raw logits of one 64 x 256 half tile; one matrix instruction group stays in flight while the next slot fills.

    The first consumer releases the second after slot ``lag_at`` (-1: not in this tile).
    """
    for k in range(num_k):
        mbarrier.wait(full.index(slot), phase)
        acc = warpgroup_mma(
            hidden_smem.index(2 * slot + HALF), weight_smem.index(slot).permute((1, 0)), acc, use_acc=k > 0,
            is_async=True,
        )  # fmt: skip
        acc = warpgroup_mma_wait(1, deps=[acc])
        # The slot before is read. (Carrying it as ``previous = slot`` fails: Triton drops a loop variable whose first
        # value is another loop variable.)
        mbarrier.arrive(empty.index(gl.where(slot == 0, STAGES - 1, slot - 1)), count=1, pred=k > 0)
        if HALF == 0:
            mbarrier.arrive(lag, count=1, pred=k == lag_at)
        slot += 1
        wrapped = slot == STAGES
        slot = gl.where(wrapped, 0, slot)
        phase = gl.where(wrapped, phase ^ 1, phase)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(gl.where(slot == 0, STAGES - 1, slot - 1)), count=1)
    return acc, slot, phase


@gluon.jit
def _mask_columns(acc, block_n, vocab, LAYOUT: gl.constexpr):
    """Columns past the vocabulary (only in the last column block) become NEGATIVE."""
    if (block_n + 1) * BLOCK_N > vocab:
        columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        acc = gl.where((columns < vocab - block_n * BLOCK_N)[None, :], acc, NEGATIVE)
    return acc


@gluon.jit
def _halves(x):
    """Left and right half of the columns, without moving a register."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    return x.reshape([M, 2, N // 2]).permute(0, 2, 1).split()


@gluon.jit
def _store_piece(piece, out_desc, staging, row, column):
    """One 64 x 64 piece through shared memory; two buffers, so at most one earlier store is still being read."""
    tma.store_wait(1)
    staging.store(piece)
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, column], staging)


@gluon.jit
def _store_tile(tile, out_desc, staging, row, column, HALF: gl.constexpr):
    """A consumer's 64 x 256 half tile, already in the output's dtype, in four pieces."""
    left, right = _halves(tile)
    piece0, piece1 = _halves(left)
    piece2, piece3 = _halves(right)
    _store_piece(piece0, out_desc, staging.index(2 * HALF), row, column)
    _store_piece(piece1, out_desc, staging.index(2 * HALF + 1), row, column + STORE_N)
    _store_piece(piece2, out_desc, staging.index(2 * HALF), row, column + 2 * STORE_N)
    _store_piece(piece3, out_desc, staging.index(2 * HALF + 1), row, column + 3 * STORE_N)


@gluon.jit
def _stats_consumer(
    hidden_smem, weight_smem, staging, full, empty, lag, share_desc, lse_ptr, entropy_ptr, num_tokens, vocab,
    num_m, num_n, num_k, scale, KEEP: gl.constexpr, HALF: gl.constexpr, LAG: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    slot = 0
    phase = 0
    lag_at = -1
    if LAG > 0:
        if HALF == 1:
            mbarrier.wait(lag, 0)
        else:
            lag_at = gl.minimum(LAG, num_k - 1)
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        block_m, block_n = _tile_position(tile, num_m, num_n, GROUP_M)
        acc = gl.zeros((HALF_M, BLOCK_N), gl.float32, layout=LAYOUT)
        acc, slot, phase = _product(
            acc, hidden_smem, weight_smem, full, empty, lag, lag_at, slot, phase, num_k, HALF, STAGES
        )
        lag_at = -1
        acc = _mask_columns(acc, block_n, vocab, LAYOUT)
        # In bits: t = z * log2(e) = scale * raw. Within the tile lse = m + log2(s), entropy = log2(s) - w / s.
        peak = gl.max(acc, axis=1) * scale
        x = acc * scale - peak[:, None]
        e = gl.exp2(x)
        s = gl.sum(e, axis=1)
        w = gl.sum(e * x, axis=1)
        log_s = gl.log2(s)
        first_row = block_m * BLOCK_M + HALF * HALF_M
        rows = first_row + gl.arange(0, HALF_M, layout=gl.SliceLayout(1, LAYOUT))
        offsets = block_n.to(gl.int64) * num_tokens + rows
        gl.store(lse_ptr + offsets, peak + log_s, mask=rows < num_tokens)
        gl.store(entropy_ptr + offsets, log_s - w / s, mask=rows < num_tokens)
        if KEEP:
            share = e * (1.0 / s)[:, None]
            _store_tile(share.to(share_desc.dtype), share_desc, staging, first_row, block_n * BLOCK_N, HALF)
    if KEEP:
        tma.store_wait(0)


@gluon.jit
def stats_kernel(
    hidden_desc, weight_desc, share_desc, lse_ptr, entropy_ptr, num_tokens, vocab, hidden_size, scale,
    KEEP: gl.constexpr, LAG: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Per tile and row: log2-sum-exp2 and entropy in bits of ``t = scale * hidden @ weight^T``; ``[num_n, T]`` each.

    ``scale`` is log2(e) / temperature. With KEEP the tiles also leave ``2^(t - lse)``.
    """
    DTYPE: gl.constexpr = hidden_desc.dtype
    hidden_smem = gl.allocate_shared_memory(DTYPE, [2 * STAGES, HALF_M, BLOCK_K], hidden_desc.layout)
    weight_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    staging = hidden_smem  # unused without KEEP
    if KEEP:
        staging = gl.allocate_shared_memory(DTYPE, [4, HALF_M, STORE_N], share_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    lag = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(lag, count=1)
    num_m = gl.cdiv(num_tokens, BLOCK_M)
    num_n = gl.cdiv(vocab, BLOCK_N)
    num_k = gl.cdiv(hidden_size, BLOCK_K)
    gl.warp_specialize(
        [
            (_stats_consumer, (hidden_smem, weight_smem, staging, full, empty, lag, share_desc, lse_ptr, entropy_ptr,
                               num_tokens, vocab, num_m, num_n, num_k, scale, KEEP, gl.constexpr(0), LAG,
                               STAGES, GROUP_M)),
            (_stats_consumer, (hidden_smem, weight_smem, staging, full, empty, lag, share_desc, lse_ptr, entropy_ptr,
                               num_tokens, vocab, num_m, num_n, num_k, scale, KEEP, gl.constexpr(1), LAG,
                               STAGES, GROUP_M)),
            (_producer, (hidden_desc, weight_desc, hidden_smem, weight_smem, full, empty, num_m, num_n, num_k, STAGES,
                         GROUP_M)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _gradient_consumer(
    hidden_smem, weight_smem, staging, full, empty, lag, out_desc, lse_ptr, alpha_ptr, beta_ptr, num_tokens, num_m,
    num_n, num_k, scale, HAS_BETA: gl.constexpr, HALF: gl.constexpr, LAG: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    slot = 0
    phase = 0
    lag_at = -1
    if LAG > 0:
        if HALF == 1:
            mbarrier.wait(lag, 0)
        else:
            lag_at = gl.minimum(LAG, num_k - 1)
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        block_m, block_n = _tile_position(tile, num_m, num_n, GROUP_M)
        first_row = block_m * BLOCK_M + HALF * HALF_M
        rows = first_row + gl.arange(0, HALF_M, layout=gl.SliceLayout(1, LAYOUT))
        acc = gl.zeros((HALF_M, BLOCK_N), gl.float32, layout=LAYOUT)
        acc, slot, phase = _product(
            acc, hidden_smem, weight_smem, full, empty, lag, lag_at, slot, phase, num_k, HALF, STAGES
        )
        lag_at = -1
        lse = gl.load(lse_ptr + rows, mask=rows < num_tokens, other=0.0)
        alpha = gl.load(alpha_ptr + rows, mask=rows < num_tokens, other=0.0)
        p = gl.exp2(acc * scale - lse[:, None])
        if HAS_BETA:
            beta = gl.load(beta_ptr + rows, mask=rows < num_tokens, other=0.0)
            da = p * (acc * beta[:, None] + alpha[:, None])
        else:
            da = p * alpha[:, None]
        _store_tile(da.to(out_desc.dtype), out_desc, staging, first_row, block_n * BLOCK_N, HALF)
    tma.store_wait(0)


@gluon.jit
def gradient_kernel(
    hidden_desc, weight_desc, out_desc, lse_ptr, alpha_ptr, beta_ptr, num_tokens, vocab, hidden_size, scale,
    HAS_BETA: gl.constexpr, LAG: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """``out = 2^(scale * raw - lse) * (alpha + beta * raw)`` in the input dtype: da of types.py but for the target.

    ``lse`` is in bits; ``alpha``, ``beta`` carry the incoming gradients, the temperature and any loss scale.
    """
    DTYPE: gl.constexpr = hidden_desc.dtype
    hidden_smem = gl.allocate_shared_memory(DTYPE, [2 * STAGES, HALF_M, BLOCK_K], hidden_desc.layout)
    weight_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    staging = gl.allocate_shared_memory(DTYPE, [4, HALF_M, STORE_N], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    lag = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(lag, count=1)
    num_m = gl.cdiv(num_tokens, BLOCK_M)
    num_n = gl.cdiv(vocab, BLOCK_N)
    num_k = gl.cdiv(hidden_size, BLOCK_K)
    gl.warp_specialize(
        [
            (_gradient_consumer, (hidden_smem, weight_smem, staging, full, empty, lag, out_desc, lse_ptr, alpha_ptr,
                                  beta_ptr, num_tokens, num_m, num_n, num_k, scale, HAS_BETA, gl.constexpr(0), LAG,
                                  STAGES, GROUP_M)),
            (_gradient_consumer, (hidden_smem, weight_smem, staging, full, empty, lag, out_desc, lse_ptr, alpha_ptr,
                                  beta_ptr, num_tokens, num_m, num_n, num_k, scale, HAS_BETA, gl.constexpr(1), LAG,
                                  STAGES, GROUP_M)),
            (_producer, (hidden_desc, weight_desc, hidden_smem, weight_smem, full, empty, num_m, num_n, num_k, STAGES,
                         GROUP_M)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
