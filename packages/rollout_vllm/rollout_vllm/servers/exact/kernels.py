"""The operations of `operations.py` on a GPU: Triton kernels whose tile shapes do not depend on the number of rows."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_Q = 64
"""Queries of a tile, counted with the query heads of one key head. Hopper's tensor cores take 64 rows; a smaller tile
would be computed by other instructions."""
_TILE_K = 32
"""Keys of a tile. With five stages two tiles are on their way to each of three programs of a multiprocessor."""


@triton.jit
def _sum_in_order(x, weight, inner, num_inner, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """The product of the rows at `x` [M, K] and the columns at `weight` [K, N] in fp32."""
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, num_inner, K):
        there = inner < num_inner - start
        total = tl.dot(
            tl.load(x, mask=there[None, :], other=0.0), tl.load(weight, mask=there[:, None], other=0.0), total,
            input_precision="ieee",
        )  # fmt: skip
        x += K
        weight += K
    return total


@triton.jit(do_not_specialize=["num_rows"])  # it would be compiled for other numbers while graphs are captured
def _matmul_kernel(
    out_ptr, x_ptr, weight_ptr, bias_ptr, num_rows, num_columns, num_inner, x_row, weight_row, out_row,
    HAS_BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile [M, N] of the output; neighboring programs share rows of `weight` in the cache."""
    tiles_m, tiles_n = tl.cdiv(num_rows, M), tl.cdiv(num_columns, N)
    program = tl.program_id(0)
    band = program // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP, GROUP)
    inside = program % (GROUP * tiles_n)
    rows = (band * GROUP + inside % height) * M + tl.arange(0, M)
    columns = (inside // height) * N + tl.arange(0, N)
    inner = tl.arange(0, K)
    x = x_ptr + (rows % num_rows).to(tl.int64)[:, None] * x_row + inner[None, :]
    weight = weight_ptr + (columns % num_columns).to(tl.int64)[None, :] * weight_row + inner[:, None]
    total = _sum_in_order(x, weight, inner, num_inner, M, N, K)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns % num_columns).to(tl.float32)[None, :]
    tl.store(
        out_ptr + rows.to(tl.int64)[:, None] * out_row + columns[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=(rows < num_rows)[:, None] & (columns < num_columns)[None, :],
    )


_M, _N, _K = 64, 128, 64
_FEW_TILES = 132
"""Fewer tiles than the multiprocessors of a GPU: narrower tiles, of the same bits, keep all of them busy."""
_CHUNKS = (16384, 8192, 4096, 2048)
"""Rows that cuBLAS computes at once: of one shape it computes each product alike."""
_same_bits: dict[tuple[object, ...], bool] = {}
"""Product -> cuBLAS gives the bits of `matmul` for so many rows."""
_plans: dict[tuple[object, ...], list[tuple[int, int]]] = {}
"""Product -> rows (begin, end) of its chunks; `matmul` computes the rows after the last one."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`matmul`; whole chunks of rows are computed by cuBLAS, which takes two thirds of the time, if it has its bits.

    Sums in order have the same bits in tiles of any shape. cuBLAS divides sums if there are few tiles; it is compared
    once for each product.
    """
    x, weight = x.contiguous(), weight.contiguous()
    if len(x) < _CHUNKS[-1]:
        return matmul(x, weight, bias)
    key = (x.device, x.dtype, len(x), weight.shape, weight.data_ptr() % 256, x.data_ptr() % 256, bias is None)
    if (plan := _plans.get(key)) is None:
        plan = _plans[key] = _chunks(x, weight, bias)
    out = x.new_empty((len(x), len(weight)))
    for begin, end in plan:
        _library(x[begin:end], weight, bias, out[begin:end])
    if (end := plan[-1][1] if plan else 0) < len(x):
        out[end:] = matmul(x[end:], weight, bias)
    return out


def _chunks(x: Tensor, weight: Tensor, bias: Tensor | None) -> list[tuple[int, int]]:
    plan, begin = [], 0
    for chunk in _CHUNKS:
        while len(x) - begin >= chunk and _has_same_bits(x[begin : begin + chunk], weight, bias):
            plan.append((begin, begin + chunk))
            begin += chunk
    if begin < len(x) and _has_same_bits(x[-chunk:], weight, bias):
        plan.append((len(x) - chunk, len(x)))  # with rows before the last ones, which get their bits again
    return plan


def _has_same_bits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    key = (x.device, x.dtype, len(x), weight.shape, weight.data_ptr() % 256, x.data_ptr() % 256, bias is None)
    if key not in _same_bits:
        out = x.new_empty((len(x), len(weight)))
        _library(x, weight, bias, out)
        _same_bits[key] = torch.equal(out, matmul(x, weight, bias))
    return _same_bits[key]


def _library(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K] @ weight [N, K].T + bias [N], summed in fp32 along K in order, in the dtype of `x`; both contiguous."""
    out = x.new_empty((len(x), len(weight)))
    if len(x) == 0:
        return out
    rows = triton.cdiv(len(x), _M)
    columns = _columns_of_tile(rows, len(weight))
    _matmul_kernel[(rows * triton.cdiv(len(weight), columns),)](
        out, x, weight, bias, len(x), len(weight), x.shape[1], x.stride(0), weight.stride(0), out.stride(0),
        HAS_BIAS=bias is not None, M=_M, N=columns, K=_K, GROUP=8, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


def _columns_of_tile(num_tiles: int, width: int) -> int:
    columns = _N
    while columns > 32 and num_tiles * triton.cdiv(width, columns) < _FEW_TILES:
        columns //= 2
    return columns


@triton.jit
def _grouped_kernel(
    out_ptr, x_ptr, weight_ptr, ends_ptr, tile_ends_ptr, num_columns, num_inner, num_experts,
    EXPERTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One tile [M, N] of the output, with rows of one expert; programs after the last tile have none."""
    tiles_n = tl.cdiv(num_columns, N)
    tile, numbers = tl.program_id(0) // tiles_n, tl.arange(0, EXPERTS)
    tile_ends = tl.load(tile_ends_ptr + numbers, mask=numbers < num_experts, other=2147483647)
    expert = tl.sum((tile_ends <= tile).to(tl.int32), axis=0)
    if expert < num_experts:
        before = expert > 0
        tile -= tl.load(tile_ends_ptr + expert - 1, mask=before, other=0)
        end = tl.load(ends_ptr + expert)
        rows = tl.load(ends_ptr + expert - 1, mask=before, other=0) + tile * M + tl.arange(0, M)
        columns = tl.program_id(0) % tiles_n * N + tl.arange(0, N)
        inner = tl.arange(0, K)
        matrix = weight_ptr + expert.to(tl.int64) * num_columns * num_inner
        total = _sum_in_order(
            x_ptr + tl.minimum(rows, end - 1).to(tl.int64)[:, None] * num_inner + inner[None, :],
            matrix + (columns % num_columns).to(tl.int64)[None, :] * num_inner + inner[:, None],
            inner, num_inner, M, N, K,
        )  # fmt: skip
        tl.store(
            out_ptr + rows.to(tl.int64)[:, None] * num_columns + columns[None, :],
            total.to(out_ptr.dtype.element_ty),
            mask=(rows < end)[:, None] & (columns < num_columns)[None, :],
        )


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """See `operations.grouped_linear`; nothing waits for the device."""
    x, weight = x.contiguous(), weight.contiguous()
    (num_experts, width, num_inner), num_rows = weight.shape, len(x)
    out = x.new_empty((num_rows, width))
    if num_rows == 0:
        return out
    tile_ends = (ends.diff(prepend=ends.new_zeros(1)) + (_M - 1)).div(_M, rounding_mode="floor").cumsum(0)
    most = min(num_rows, num_rows // _M + num_experts)
    columns = _columns_of_tile(most, width)
    _grouped_kernel[(most * triton.cdiv(width, columns),)](
        out, x, weight, ends, tile_ends.to(torch.int32), width, num_inner, num_experts,
        EXPERTS=triton.next_power_of_2(num_experts), M=_M, N=columns, K=_K, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


@triton.jit
def _collect_kernel(out_ptr, rows_ptr, place_ptr, width, NUM: tl.constexpr, BLOCK: tl.constexpr):
    token, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    for number in range(NUM):
        row = tl.load(place_ptr + token * NUM + number).to(tl.int64)
        total += tl.load(rows_ptr + row * width + columns, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + columns, total.to(out_ptr.dtype.element_ty), mask=there)


def collect(rows: Tensor, place: Tensor) -> Tensor:
    """See `operations.collect`."""
    width, (num, per_token) = rows.shape[1], place.shape
    out = rows.new_empty((num, width))
    if num:
        _collect_kernel[(num, triton.cdiv(width, 1024))](
            out, rows.contiguous(), place.contiguous(), width, NUM=per_token, BLOCK=1024, num_warps=4
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    out_ptr, x_ptr, weight_ptr, residual_ptr, sum_ptr, eps, num_rows, width, heads, token_stride,
    HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """ROWS rows; all of them are summed alike."""
    row, columns = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None], tl.arange(0, WIDTH)[None, :]
    there = (row < num_rows) & (columns < width)
    start = (row // heads).to(tl.int64) * token_stride + row % heads * width
    place = row.to(tl.int64) * width + columns
    x = tl.load(x_ptr + start + columns, mask=there, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + place, mask=there, other=0.0)
        # Rounded to fp32 first, as a sum of tensors is: the GPU's own sum in bf16 rounds once.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(out_ptr.dtype.element_ty)
        tl.store(sum_ptr + place, x, mask=there)
    x = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / width + eps)
    rounded = (x * scale[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, rounded * tl.load(weight_ptr + columns, mask=columns < width), mask=there)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, sum) in one pass, with the bits of the two operations."""
    width = x.shape[-1]
    if residual is None and x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == width:  # heads inside a merged product
        heads, token_stride = x.shape[1], x.stride(0)
    else:
        x, heads, token_stride = x.contiguous(), 1, width
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows, padded = x.numel() // width, triton.next_power_of_2(width)
    rows = max(1, 2048 // padded) if padded < 512 else 1  # a program for each head costs more than its norm
    warps = min(8, max(1, rows * padded // 512))
    residual, total = (None, x) if residual is None else (residual.contiguous(), torch.empty_like(out))
    _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        out, x, weight, residual, total, eps, num_rows, width, heads, token_stride,
        HAS_RESIDUAL=residual is not None, ROWS=rows, WIDTH=padded, num_warps=warps,
    )  # fmt: skip
    return out, total


@triton.jit
def _silu_and_mul_kernel(out_ptr, gate_ptr, up_ptr, width, gate_row, up_row, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < width
    gate = tl.load(gate_ptr + row * gate_row + column, mask=there, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, (active * up).to(gate.dtype), mask=there)


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """See `operations.silu_and_mul`."""
    width = gate.shape[-1]
    rows = [x if x.stride(-1) == 1 and x.dim() == 2 else x.reshape(-1, width).contiguous() for x in (gate, up)]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _silu_and_mul_kernel[(len(rows[0]), triton.cdiv(width, 1024))](
        out, *rows, width, rows[0].stride(0), rows[1].stride(0), BLOCK=1024, num_warps=4
    )  # fmt: skip
    return out


@triton.jit
def _rotate_kernel(
    out_ptr, x_ptr, table_ptr, position_ptr, heads, token_stride, head_stride, SIGN: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """All heads of a token. Products and sums are rounded one by one, as those of tensors are."""
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    there = (head < heads) & (column < HALF)
    place = x_ptr + token * token_stride + head * head_stride + column
    first, second = tl.load(place, mask=there, other=0.0), tl.load(place + HALF, mask=there, other=0.0)
    dtype = first.dtype
    row = table_ptr + tl.load(position_ptr + token) * 4 * HALF + column
    cos_1, cos_2 = tl.load(row).to(tl.float32), tl.load(row + HALF).to(tl.float32)
    sin_1, sin_2 = SIGN * tl.load(row + 2 * HALF).to(tl.float32), SIGN * tl.load(row + 3 * HALF).to(tl.float32)
    first, second = first.to(tl.float32), second.to(tl.float32)
    out_1 = (first * cos_1).to(dtype).to(tl.float32) + (-second * sin_1).to(dtype).to(tl.float32)
    out_2 = (second * cos_2).to(dtype).to(tl.float32) + (first * sin_2).to(dtype).to(tl.float32)
    out = out_ptr + (token * heads + head) * 2 * HALF + column
    tl.store(out, out_1.to(dtype), mask=there)
    tl.store(out + HALF, out_2.to(dtype), mask=there)


def rotate(x: Tensor, table: Tensor, positions: Tensor, inverse: bool) -> Tensor:
    """See `operations.rotate`."""
    tokens, heads, width = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    out = torch.empty((tokens, heads, width), dtype=x.dtype, device=x.device)
    _rotate_kernel[(tokens,)](
        out, x, table, positions, heads, x.stride(0), x.stride(1),
        SIGN=-1.0 if inverse else 1.0, HEADS=triton.next_power_of_2(heads), HALF=width // 2, num_warps=2,
        enable_fp_fusion=False,  # a product that is added would not be rounded
    )  # fmt: skip
    return out


@triton.jit
def _exponentials_kernel(
    lanes_ptr, weighted_ptr, top_ptr, logits_ptr, row_stride, width, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A row's largest logit and, for each lane, sums of exp(logit - largest) and of their products with logits."""
    row = tl.program_id(0).to(tl.int64)
    largest, total = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * row_stride + columns, mask=columns < width, other=float("-inf"))
        logits = logits.to(tl.float32)
        top = tl.maximum(largest, logits)
        shift = tl.where(top == float("-inf"), 0.0, top)
        fade, weight = tl.exp(largest - shift), tl.exp(logits - shift)
        total = total * fade + weight
        if HAS_ENTROPY:
            weighted = weighted * fade + tl.where(weight == 0.0, 0.0, weight * logits)
        largest = top
    top = tl.max(largest, axis=0)
    fade = tl.exp(largest - top)
    tl.store(top_ptr + row, top)
    tl.store(lanes_ptr + row * BLOCK + tl.arange(0, BLOCK), total * fade)
    if HAS_ENTROPY:
        tl.store(weighted_ptr + row, tl.sum(weighted * fade, axis=0))


@triton.jit
def _sum_lanes_kernel(
    log_sum_ptr, entropy_ptr, lanes_ptr, weighted_ptr, top_ptr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    total = tl.sum(tl.load(lanes_ptr + row * BLOCK + tl.arange(0, BLOCK)), axis=0)
    log_sum = tl.load(top_ptr + row) + tl.log(total)
    tl.store(log_sum_ptr + row, log_sum)
    if HAS_ENTROPY:
        tl.store(entropy_ptr + row, log_sum - tl.load(weighted_ptr + row) / total)


def log_sum_exp(logits: Tensor, *, entropies: bool = False) -> tuple[Tensor, Tensor]:
    """(log(sum(exp)) of rows, their entropies or undefined values), fp32 [N]; reads the logits once.

    The bits are the same for logits in bf16 and for these in fp32: threads hold more numbers of a narrow dtype, so the
    sum of the lanes would have another order in the same kernel.

    Args:
        logits: [N, V], with contiguous columns.
    """
    num, width = logits.shape
    lanes = torch.empty((num, 2048), dtype=torch.float32, device=logits.device)
    log_sums, entropy, weighted, top = (lanes.new_empty(num) for _ in range(4))
    options = {"HAS_ENTROPY": entropies, "BLOCK": 2048, "num_warps": 8}
    options["enable_fp_fusion"] = False  # which might differ between forms of a kernel
    _exponentials_kernel[(num,)](lanes, weighted, top, logits, logits.stride(0), width, **options)
    _sum_lanes_kernel[(num,)](log_sums, entropy, lanes, weighted, top, **options)
    return log_sums, entropy


@triton.jit
def _attention_kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, table_ptr, starts_ptr, lengths_ptr, scale, lse_head,
    q_row, q_head, out_row, out_head, k_block, k_head, k_token, v_block, v_head, v_token, table_row,
    HAS_LSE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PER_HEAD: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one key head and sequence, over tiles of its keys from position 0 on."""
    first_row, head, sequence = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin = tl.load(starts_ptr + sequence)
    num = tl.load(starts_ptr + sequence + 1) - begin
    length = tl.load(lengths_ptr + sequence)
    if first_row < num * PER_HEAD:
        rows = first_row + tl.arange(0, ROWS)
        token = rows // PER_HEAD
        query = head * PER_HEAD + rows % PER_HEAD
        real = token < num
        position = length - num + token
        columns = tl.arange(0, WIDTH)
        place_q = (begin + token).to(tl.int64)
        q = tl.load(
            q_ptr + place_q[:, None] * q_row + query[:, None] * q_head + columns[None, :], mask=real[:, None], other=0.0
        )
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        values = tl.zeros([ROWS, WIDTH], tl.float32)
        end = tl.minimum(length, length - num + (first_row + ROWS - 1) // PER_HEAD + 1)
        for number in range((end + TILE - 1) // TILE):
            key_position = number * TILE + tl.arange(0, TILE)
            there = key_position < length
            block = tl.load(table_ptr + sequence * table_row + key_position // BLOCK, mask=there, other=0).to(tl.int64)
            place = key_position % BLOCK
            key = tl.load(
                k_ptr + (block * k_block + place * k_token + head * k_head)[None, :] + columns[:, None],
                mask=there[None, :],
                other=0.0,
            )
            value = tl.load(
                v_ptr + (block * v_block + place * v_token + head * v_head)[:, None] + columns[None, :],
                mask=there[:, None],
                other=0.0,
            )
            scores = tl.dot(q, key, input_precision="ieee") * scale
            scores = tl.where(there[None, :] & (key_position[None, :] <= position[:, None]), scores, float("-inf"))
            top = tl.maximum(largest, tl.max(scores, axis=1))
            weights = tl.exp2(scores - top[:, None])
            fade = tl.exp2(largest - top)
            total = total * fade + tl.sum(weights, axis=1)
            values = tl.dot(weights.to(value.dtype), value, values * fade[:, None], input_precision="ieee")
            largest = top
        tl.store(
            out_ptr + place_q[:, None] * out_row + query[:, None] * out_head + columns[None, :],
            (values / total[:, None]).to(out_ptr.dtype.element_ty),
            mask=real[:, None],
        )
        if HAS_LSE:
            tl.store(lse_ptr + query * lse_head + place_q, (largest + tl.log2(total)) * 0.6931471805599453, mask=real)


def attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, query_start: Tensor, lengths: Tensor, scale: float, longest_q: int,
    out: Tensor | None = None, lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `operations.attention`."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    heads, width, key_heads = q.shape[1], q.shape[2], k.shape[1]
    per_head = heads // key_heads
    grid = (triton.cdiv(longest_q * per_head, _TILE_Q), key_heads, len(lengths))
    _attention_kernel[grid](
        out, lse, q, k, v, table, query_start, lengths, scale * math.log2(math.e), 0 if lse is None else lse.stride(0),
        q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2), table.stride(0),
        HAS_LSE=lse is not None, BLOCK=k.shape[2], WIDTH=width, PER_HEAD=per_head, ROWS=_TILE_Q, TILE=_TILE_K,
        num_warps=4, num_stages=5,
    )  # fmt: skip
    return out
