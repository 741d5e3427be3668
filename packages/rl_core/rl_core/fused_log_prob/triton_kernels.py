"""Portable Triton kernels for all GPUs that Triton supports and its interpreter: bf16, fp16, fp32, bias, soft cap.

Each program computes one tile of the matrix product. The warp-specialized kernels of hopper_kernels.py replace
``tile_stats_kernel`` and ``tile_gradient_kernel`` where they are supported; both paths use the small row kernels.

Exponentials and logarithms are base 2, as in hardware: ``t = z * log2(e)``, in bits.
"""

import triton
import triton.language as tl

from .types import MARGIN_BITS

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NEGATIVE = tl.constexpr(-1.0e30)  # finite, so that 0 * NEGATIVE is 0 and not NaN
MARGIN = tl.constexpr(MARGIN_BITS)

#: The number of tokens differs in almost every call, and with it the alignment of rows of one number per token.
#: Specialized on them, kernels would compile again within a run: 7 s at the first number that is no multiple of 16.
_ROWS = ("lse", "entropy", "tile_lse", "tile_entropy", "mean", "reference", "alpha", "beta", "values", "targets")
ANY_NUMBER_OF_TOKENS = {
    "do_not_specialize": ("num_tokens",),
    "do_not_specialize_on_alignment": tuple(f"{name}_ptr" for name in _ROWS),
}


@triton.jit
def _tile_position(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """Row block and column block of a tile; rows are fastest within groups, so neighbors share blocks in L2."""
    per_group = GROUP_M * num_n
    group = tile // per_group
    first_m = group * GROUP_M
    rows = tl.minimum(num_m - first_m, GROUP_M)
    inside = tile - group * per_group
    return first_m + inside % rows, inside // rows


@triton.jit
def _soft_cap(raw, soft_cap):
    """``cap * tanh(raw / cap)`` with one exponential; if it overflows, the result is exactly the cap."""
    return soft_cap * (1.0 - 2.0 / (tl.exp2(raw * (2.0 * LOG2_E / soft_cap)) + 1.0))


@triton.jit
def _capped_tile(
    hidden_ptr, weight_ptr, bias_ptr, rows, columns, num_tokens, vocab, hidden_size, soft_cap, HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``u`` of types.py for a BLOCK_M x BLOCK_N tile in float32; columns past the vocabulary hold NEGATIVE."""
    inner = tl.arange(0, BLOCK_K)
    # Rows and columns out of range read the last one in range; their results are never used.
    safe_rows = tl.minimum(rows, num_tokens - 1).to(tl.int64)
    safe_columns = tl.minimum(columns, vocab - 1).to(tl.int64)
    hidden_ptrs = hidden_ptr + safe_rows[:, None] * hidden_size + inner[None, :]
    weight_ptrs = weight_ptr + safe_columns[None, :] * hidden_size + inner[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(tl.cdiv(hidden_size, BLOCK_K)):
        if EVEN_K:
            hidden = tl.load(hidden_ptrs)
            weight = tl.load(weight_ptrs)
        else:
            inside = inner < hidden_size - k * BLOCK_K
            hidden = tl.load(hidden_ptrs, mask=inside[None, :], other=0.0)
            weight = tl.load(weight_ptrs, mask=inside[:, None], other=0.0)
        if UPCAST:
            hidden = hidden.to(tl.float32)
            weight = weight.to(tl.float32)
        acc = tl.dot(hidden, weight, acc, input_precision=PRECISION)
        hidden_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    if HAS_BIAS:
        acc += tl.load(bias_ptr + safe_columns).to(tl.float32)[None, :]
    if HAS_CAP:
        acc = _soft_cap(acc, soft_cap)
    return tl.where((columns < vocab)[None, :], acc, NEGATIVE)


@triton.jit
def share_base(tile_lse, reference):
    """Base of the kept numbers of a tile: the reference of the row, or the lse of the tile if that is far above."""
    return tl.where(tile_lse > reference + MARGIN, tile_lse, reference)


@triton.jit(**ANY_NUMBER_OF_TOKENS)
def tile_stats_kernel(
    hidden_ptr, weight_ptr, bias_ptr, reference_ptr, lse_ptr, entropy_ptr, share_ptr, num_tokens, vocab, hidden_size,
    share_stride, scale, soft_cap, KEEP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr,
    EVEN_K: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Per tile and row: log2-sum-exp2 and entropy in bits of ``t = scale * u``; two ``[num_n, T]`` outputs.

    Within a tile with maximum ``m``, ``s = sum 2^(t - m)`` and ``w = sum 2^(t - m) (t - m)``:
    ``lse = m + log2 s`` and ``entropy = log2 s - w / s``. ``scale`` is log2(e) / temperature. With KEEP the tiles
    also store ``2^(t - base)``, see share_base.
    """
    num_m = tl.cdiv(num_tokens, BLOCK_M)
    num_n = tl.cdiv(vocab, BLOCK_N)
    block_m, block_n = _tile_position(tl.program_id(0), num_m, num_n, GROUP_M)
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    u = _capped_tile(
        hidden_ptr, weight_ptr, bias_ptr, rows, columns, num_tokens, vocab, hidden_size, soft_cap, HAS_BIAS, HAS_CAP,
        EVEN_K, UPCAST, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    peak = tl.max(u, axis=1) * scale
    x = u * scale - peak[:, None]
    e = tl.exp2(x)
    s = tl.sum(e, axis=1)
    w = tl.sum(e * x, axis=1)
    log_s = tl.log2(s)
    offsets = block_n.to(tl.int64) * num_tokens + rows
    tl.store(lse_ptr + offsets, peak + log_s, mask=rows < num_tokens)
    tl.store(entropy_ptr + offsets, log_s - w / s, mask=rows < num_tokens)
    if KEEP:
        reference = tl.load(reference_ptr + rows, mask=rows < num_tokens, other=0.0)
        share = e * tl.exp2(peak - share_base(peak + log_s, reference))[:, None]
        offsets = rows.to(tl.int64)[:, None] * share_stride + columns[None, :]
        inside = (rows < num_tokens)[:, None] & (columns < vocab)[None, :]
        tl.store(share_ptr + offsets, share.to(share_ptr.dtype.element_ty), mask=inside)


@triton.jit(**ANY_NUMBER_OF_TOKENS)
def combine_kernel(
    tile_lse_ptr, tile_entropy_ptr, lse_ptr, mean_ptr, num_tokens, num_tiles, BLOCK_T: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """Reduce tiles to rows, in nats: ``entropy = sum P_i (entropy_i - log2 P_i)`` with ``P_i = 2^(lse_i - lse)``.

    One pass with a running maximum ``m``, ``s = sum 2^(lse_i - m)``, ``q = sum 2^(lse_i - m) (entropy_i - lse_i + m)``.
    """
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    m = tl.full((BLOCK_T,), NEGATIVE, dtype=tl.float32)
    s = tl.zeros((BLOCK_T,), dtype=tl.float32)
    q = tl.zeros((BLOCK_T,), dtype=tl.float32)
    for first in range(0, num_tiles, BLOCK_TILES):
        tiles = first + tl.arange(0, BLOCK_TILES)
        inside = (tiles < num_tiles)[:, None] & (rows < num_tokens)[None, :]
        offsets = tiles.to(tl.int64)[:, None] * num_tokens + rows[None, :]
        lse = tl.load(tile_lse_ptr + offsets, mask=inside, other=NEGATIVE)
        entropy = tl.load(tile_entropy_ptr + offsets, mask=inside, other=0.0)
        new_m = tl.maximum(m, tl.max(lse, axis=0))
        shrink = tl.exp2(m - new_m)
        share = tl.exp2(lse - new_m[None, :])
        q = shrink * (q + s * (new_m - m)) + tl.sum(share * (entropy - lse + new_m[None, :]), axis=0)
        s = shrink * s + tl.sum(share, axis=0)
        m = new_m
    lse_nats = (m + tl.log2(s)) * LN_2
    entropy_nats = (tl.log2(s) + q / s) * LN_2
    tl.store(lse_ptr + rows, lse_nats, mask=rows < num_tokens)
    tl.store(mean_ptr + rows, lse_nats - entropy_nats, mask=rows < num_tokens)


@triton.jit(**ANY_NUMBER_OF_TOKENS)
def target_kernel(
    hidden_ptr, weight_ptr, bias_ptr, targets_ptr, out_ptr, num_tokens, vocab, hidden_size, inverse_temperature,
    soft_cap, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``z`` of the target of each row; 0 where another rank holds the target.

    Computes the diagonal of BLOCK_T rows times their BLOCK_T gathered weight rows. That is BLOCK_T times the arithmetic
    of dot products, still negligible compared with the tiles. In exchange it uses the tensor cores in the same order as
    the tiles, whose float32 sums are truncated instead of rounded. So a target with all the probability gets a log-prob
    of 0 instead of the difference between two summation orders.
    """
    local = tl.arange(0, BLOCK_T)
    rows = tl.program_id(0) * BLOCK_T + local
    inner = tl.arange(0, BLOCK_K)
    targets = tl.load(targets_ptr + rows, mask=rows < num_tokens, other=-1)
    held = (targets >= 0) & (targets < vocab)
    safe_rows = tl.minimum(rows, num_tokens - 1).to(tl.int64)
    safe_targets = tl.where(held, targets, 0)
    hidden_ptrs = hidden_ptr + safe_rows[:, None] * hidden_size + inner[None, :]
    weight_ptrs = weight_ptr + safe_targets[None, :] * hidden_size + inner[:, None]
    acc = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
    for k in range(tl.cdiv(hidden_size, BLOCK_K)):
        inside = inner < hidden_size - k * BLOCK_K
        hidden = tl.load(hidden_ptrs, mask=inside[None, :], other=0.0)
        weight = tl.load(weight_ptrs, mask=inside[:, None], other=0.0)
        if UPCAST:
            hidden = hidden.to(tl.float32)
            weight = weight.to(tl.float32)
        acc = tl.dot(hidden, weight, acc, input_precision=PRECISION)
        hidden_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    raw = tl.sum(tl.where(local[:, None] == local[None, :], acc, 0.0), axis=1)
    if HAS_BIAS:
        raw += tl.load(bias_ptr + safe_targets).to(tl.float32)
    if HAS_CAP:
        raw = _soft_cap(raw, soft_cap)
    tl.store(out_ptr + rows, tl.where(held, raw * inverse_temperature, 0.0), mask=rows < num_tokens)


@triton.jit(**ANY_NUMBER_OF_TOKENS)
def tile_gradient_kernel(
    hidden_ptr, weight_ptr, bias_ptr, out_ptr, lse_ptr, alpha_ptr, beta_ptr, num_tokens, vocab, hidden_size,
    out_stride, scale, soft_cap, HAS_BETA: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr,
    EVEN_K: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """``out = 2^(scale * u - lse) * (alpha + beta * u) * (1 - (u / cap)^2)``: da of types.py except for the targets.

    target_gradient_kernel writes the entries of the targets. ``lse`` is in bits; ``alpha`` and ``beta`` contain the
    incoming gradients, the temperature and any loss scale.
    """
    num_m = tl.cdiv(num_tokens, BLOCK_M)
    num_n = tl.cdiv(vocab, BLOCK_N)
    block_m, block_n = _tile_position(tl.program_id(0), num_m, num_n, GROUP_M)
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    u = _capped_tile(
        hidden_ptr, weight_ptr, bias_ptr, rows, columns, num_tokens, vocab, hidden_size, soft_cap, HAS_BIAS, HAS_CAP,
        EVEN_K, UPCAST, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    inside = rows < num_tokens
    lse = tl.load(lse_ptr + rows, mask=inside, other=0.0)
    factor = tl.load(alpha_ptr + rows, mask=inside, other=0.0)[:, None]
    if HAS_BETA:
        factor = factor + tl.load(beta_ptr + rows, mask=inside, other=0.0)[:, None] * u
    da = tl.exp2(u * scale - lse[:, None]) * factor
    if HAS_CAP:
        da *= 1.0 - (u / soft_cap) * (u / soft_cap)
    offsets = rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(out_ptr + offsets, da.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (columns < vocab)[None, :])


@triton.jit(**ANY_NUMBER_OF_TOKENS)
def kept_gradient_kernel(
    share_ptr, tile_lse_ptr, reference_ptr, lse_ptr, alpha_ptr, beta_ptr, num_tokens, num_columns, stride,
    inverse_scale, soft_cap, HAS_BETA: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The result of tile_gradient_kernel from the kept numbers ``2^(t - base)`` of one tile, in place."""
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    tile = tl.program_id(1)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    held = rows < num_tokens
    inside = held[:, None] & (columns < num_columns)[None, :]
    offsets = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    share = tl.load(share_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    tile_lse = tl.load(tile_lse_ptr + tile.to(tl.int64) * num_tokens + rows, mask=held, other=0.0)
    base = share_base(tile_lse, tl.load(reference_ptr + rows, mask=held, other=0.0))
    weight = tl.exp2(base - tl.load(lse_ptr + rows, mask=held, other=0.0))
    factor = (weight * tl.load(alpha_ptr + rows, mask=held, other=0.0))[:, None]
    if HAS_BETA or HAS_CAP:
        # A share this small contributes nothing for any finite u.
        u = (tl.log2(tl.maximum(share, 1.0e-30)) + base[:, None]) * inverse_scale
        if HAS_BETA:
            factor = factor + (weight * tl.load(beta_ptr + rows, mask=held, other=0.0))[:, None] * u
        if HAS_CAP:
            factor = factor * (1.0 - (u / soft_cap) * (u / soft_cap))
    tl.store(share_ptr + offsets, (share * factor).to(share_ptr.dtype.element_ty), mask=inside)


@triton.jit(**ANY_NUMBER_OF_TOKENS)
def rebase_kernel(
    share_ptr, tile_lse_ptr, reference_ptr, lse_ptr, num_tokens, num_columns, num_tiles, stride, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Turn kept numbers ``2^(t - base)`` into probabilities, in place, in rows with an lse far above the reference."""
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    reference = tl.load(reference_ptr + rows, mask=rows < num_tokens, other=0.0)
    lse = tl.load(lse_ptr + rows, mask=rows < num_tokens, other=0.0)
    far = lse > reference + MARGIN
    if tl.max(far.to(tl.int32), axis=0) > 0:
        for tile in range(tl.program_id(1) * TILES, tl.minimum((tl.program_id(1) + 1) * TILES, num_tiles)):
            columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            inside = far[:, None] & (columns < num_columns)[None, :]
            offsets = rows.to(tl.int64)[:, None] * stride + columns[None, :]
            share = tl.load(share_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
            tile_lse = tl.load(tile_lse_ptr + tl.cast(tile, tl.int64) * num_tokens + rows, mask=far, other=0.0)
            share *= tl.exp2(share_base(tile_lse, reference) - lse)[:, None]
            tl.store(share_ptr + offsets, share.to(share_ptr.dtype.element_ty), mask=inside)


@triton.jit(**ANY_NUMBER_OF_TOKENS)
def target_gradient_kernel(
    out_ptr, targets_ptr, values_ptr, num_tokens, first_column, num_columns, out_stride, BLOCK: tl.constexpr
):
    """Overwrite the entries of the targets within this block of columns with their ``da``."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(targets_ptr + rows, mask=rows < num_tokens, other=-1) - first_column
    inside = (column >= 0) & (column < num_columns)
    values = tl.load(values_ptr + rows, mask=rows < num_tokens, other=0.0)
    tl.store(out_ptr + rows.to(tl.int64) * out_stride + column, values.to(out_ptr.dtype.element_ty), mask=inside)
