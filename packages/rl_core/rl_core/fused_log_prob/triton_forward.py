"""Forward pass on the GPU: tiles give ``[tiles, N]`` partial statistics, which are reduced to rows. No atomics."""

import math

import torch
import triton
from torch import Tensor

from . import hopper
from .tiles import KeepPlan, TileConfig, plan_keeping
from .triton_kernels import combine_kernel, target_kernel, tile_stats_kernel
from .types import Keeping, Kept, LogitSpec, RowStats, ShareOutput

LOG2_E = math.log2(math.e)
MAX_ROWS = 16384  # rows of one launch; bounds the partial statistics, 78 MB at 151,936 columns
GROUP_M = 8
REFERENCE_COLUMNS = 64  # enough for the largest logit to be within MARGIN_BITS of lse in nearly all rows


def portable_tile_stats(
    lse: Tensor, entropy: Tensor, hidden_NH: Tensor, weight_CH: Tensor, bias_C: Tensor | None, spec: LogitSpec,
    config: TileConfig, share: ShareOutput | None,
) -> None:  # fmt: skip
    """Fill ``[tiles, N]`` log2-sum-exp2 and entropy in bits per ``config.block_n`` columns, and ``share`` (Kept)."""
    (num_rows, hidden_size), num_columns = hidden_NH.shape, weight_CH.shape[0]
    tile_stats_kernel[(triton.cdiv(num_rows, config.block_m) * triton.cdiv(num_columns, config.block_n),)](
        hidden_NH, weight_CH, weight_CH if bias_C is None else bias_C, lse if share is None else share.reference_N, lse,
        entropy, lse if share is None else share.out_NC, num_rows, num_columns, hidden_size,
        0 if share is None else share.out_NC.stride(0), LOG2_E / spec.temperature, spec.soft_cap or 1.0,
        KEEP=share is not None, **tile_arguments(hidden_NH, bias_C, spec, config),
    )  # fmt: skip


def tile_arguments(
    hidden_NH: Tensor, bias_V: Tensor | None, spec: LogitSpec, config: TileConfig
) -> dict[str, int | bool | str]:
    """The compile-time arguments of both portable tile kernels."""
    return {
        "HAS_BIAS": bias_V is not None,
        "HAS_CAP": spec.soft_cap is not None,
        "EVEN_K": hidden_NH.shape[1] % config.block_k == 0,
        "UPCAST": not hidden_NH.is_cuda,  # the interpreter cannot multiply bf16
        "PRECISION": "ieee",  # affects float32 inputs only; bf16 and fp16 products are exact in float32
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": GROUP_M,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def row_stats(tile_lse: Tensor, tile_entropy: Tensor) -> tuple[Tensor, Tensor]:
    """``[N]`` lse and mean of z in nats from the statistics of all tiles."""
    num_tiles, num_rows = tile_lse.shape
    lse_N, mean_z_N = torch.empty(2, num_rows, dtype=torch.float32, device=tile_lse.device)
    combine_kernel[(triton.cdiv(num_rows, 32),)](
        tile_lse, tile_entropy, lse_N, mean_z_N, num_rows, num_tiles, BLOCK_T=32, BLOCK_TILES=64, num_warps=4
    )
    return lse_N, mean_z_N


def target_logits(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, spec: LogitSpec
) -> Tensor:
    """z of the targets, ``[N]``."""
    num_rows, hidden_size = hidden_NH.shape
    out_N = torch.empty(num_rows, dtype=torch.float32, device=hidden_NH.device)
    target_kernel[(triton.cdiv(num_rows, 64),)](
        hidden_NH, weight_VH, weight_VH if bias_V is None else bias_V, targets_N, out_N, num_rows, weight_VH.shape[0],
        hidden_size, 1.0 / spec.temperature, spec.soft_cap or 1.0, HAS_BIAS=bias_V is not None,
        HAS_CAP=spec.soft_cap is not None, UPCAST=not hidden_NH.is_cuda, PRECISION="ieee", BLOCK_T=64,
        BLOCK_K=32 if hidden_NH.dtype == torch.float32 else 64, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out_N


def tile_buffers(num_rows: int, num_columns: int, tile_columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Uninitialized lse and entropy of every tile and row, ``[tiles, N]`` each."""
    lse, entropy = torch.empty(2, triton.cdiv(num_columns, tile_columns), num_rows, dtype=torch.float32, device=device)
    return lse, entropy


def row_references(hidden_NH: Tensor, weight_VH: Tensor, spec: LogitSpec) -> Tensor:
    """Kept.reference_N: the largest of the first logits of each row, in bits. It need not be precise."""
    logits_NC = hidden_NH @ weight_VH[:REFERENCE_COLUMNS].T
    return logits_NC.amax(1).float() * (LOG2_E / spec.temperature)


def forward_rows(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, spec: LogitSpec,
    config: TileConfig | None, keeping: Keeping,
) -> RowStats:  # fmt: skip
    """Statistics of every row, MAX_ROWS at a time; ``config`` None runs the Hopper kernel."""
    (num_rows, hidden_size), vocab, dtype = hidden_NH.shape, weight_VH.shape[0], hidden_NH.dtype
    tile_columns = hopper.BLOCK_N if config is None else config.block_n
    if config is None:
        spec = hopper.corrected(spec, hidden_size)
    plan = KeepPlan()
    if dtype != torch.float16:  # small shares would underflow in fp16
        plan = plan_keeping(num_rows, vocab, hidden_size, dtype.itemsize, tile_columns, keeping)
    shares, grad_memory_VH = _kept_blocks(plan, hidden_NH, weight_VH)
    kept_tiles = triton.cdiv(sum(share_NC.shape[1] for share_NC in shares), tile_columns)
    whole = plan.whole and bias_V is None and spec.soft_cap is None
    if whole:
        reference_N = row_references(hidden_NH, weight_VH, spec)
    else:  # so low that every tile has its own base
        reference_N = hidden_NH.new_full((num_rows,), -1.0e30, dtype=torch.float32)
    pieces: list[tuple[Tensor, Tensor]] = []
    tile_lse: list[Tensor] = []
    for start in range(0, num_rows, MAX_ROWS):
        rows = slice(start, start + MAX_ROWS)
        tiles = tile_buffers(hidden_NH[rows].shape[0], vocab, tile_columns, hidden_NH.device)
        first = 0
        for share_NC in (*shares, None):
            columns = slice(first, vocab if share_NC is None else first + share_NC.shape[1])
            if columns.stop > first:
                share = None if share_NC is None else ShareOutput(out_NC=share_NC[rows], reference_N=reference_N[rows])
                _column_stats(tiles, hidden_NH[rows], weight_VH, bias_V, columns, spec, config, share)
            first = columns.stop
        pieces.append(row_stats(*tiles))
        if shares:
            tile_lse.append(tiles[0][:kept_tiles].clone())
    lse_N, mean_z_N = pieces[0] if len(pieces) == 1 else (torch.cat(parts) for parts in zip(*pieces, strict=True))
    target_z_N = target_logits(hidden_NH, weight_VH, bias_V, targets_N, spec)
    kept = None
    if shares:
        kept = Kept(
            shares=shares, tile_lse=tuple(tile_lse), tile_columns=tile_columns, rows_per_block=MAX_ROWS,
            reference_N=reference_N, whole=whole, grad_memory_VH=grad_memory_VH,
        )  # fmt: skip
    return RowStats(lse_N=lse_N, mean_z_N=mean_z_N, target_z_N=target_z_N, kept=kept)


def _kept_blocks(plan: KeepPlan, hidden_NH: Tensor, weight_VH: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """Uninitialized blocks of types.Kept: first those in the memory of the weight's gradient, then the others."""
    num_rows = hidden_NH.shape[0]
    shares: list[Tensor] = []
    grad_memory_VH = None
    if plan.num_grad_blocks:
        grad_memory_VH = torch.empty_like(weight_VH)
        blocks = grad_memory_VH.view(-1)[-plan.num_grad_blocks * num_rows * plan.grad_block_width :]
        shares.extend(blocks.view(plan.num_grad_blocks, num_rows, plan.grad_block_width).unbind())
    if plan.own:
        # TMA and the matrix products need a row stride of a multiple of 16 bytes, for any vocabulary.
        shares.append(hidden_NH.new_empty(num_rows, -(-plan.own // 8) * 8)[:, : plan.own])
    return shares, grad_memory_VH


def _column_stats(
    tiles: tuple[Tensor, Tensor], hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, columns: slice,
    spec: LogitSpec, config: TileConfig | None, share: ShareOutput | None,
) -> None:  # fmt: skip
    """Fill the part of ``tiles`` that belongs to ``columns``, which start at a tile."""
    tile_columns = hopper.BLOCK_N if config is None else config.block_n
    lse, entropy = (part[columns.start // tile_columns : triton.cdiv(columns.stop, tile_columns)] for part in tiles)
    weight_CH, bias_C = weight_VH[columns], None if bias_V is None else bias_V[columns]
    if config is None:
        hopper.tile_stats(lse, entropy, hidden_NH, weight_CH, LOG2_E / spec.temperature, share)
    else:
        portable_tile_stats(lse, entropy, hidden_NH, weight_CH, bias_C, spec, config, share)
