"""Forward pass on the GPU: tiles -> ``[tiles, N]`` partial statistics -> rows. No ``[N, V]``, no atomics."""

import math

import torch
import triton
from torch import Tensor

from . import hopper
from .tiles import TileConfig, kept_columns
from .triton_kernels import combine_kernel, target_kernel, tile_stats_kernel
from .types import Kept, LogitSpec, RowStats

LOG2_E = math.log2(math.e)
MAX_ROWS = 16384  # rows of one launch: bounds the partial statistics, 78 MB at 151,936 columns
GROUP_M = 8


def portable_tile_stats(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, spec: LogitSpec, config: TileConfig,
    share_NK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``[tiles, N]`` log2-sum-exp2 and entropy in bits of every ``config.block_n`` columns; fills ``share`` (Kept)."""
    (num_rows, hidden_size), vocab = hidden_NH.shape, weight_VH.shape[0]
    num_tiles = triton.cdiv(vocab, config.block_n)
    lse, entropy = torch.empty(2, num_tiles, num_rows, dtype=torch.float32, device=hidden_NH.device)
    tile_stats_kernel[(triton.cdiv(num_rows, config.block_m) * num_tiles,)](
        hidden_NH, weight_VH, weight_VH if bias_V is None else bias_V, lse, entropy,
        lse if share_NK is None else share_NK, num_rows, vocab, hidden_size,
        0 if share_NK is None else share_NK.stride(0), 0 if share_NK is None else share_NK.shape[1],
        LOG2_E / spec.temperature, spec.soft_cap or 1.0, KEEP=share_NK is not None,
        **tile_arguments(hidden_NH, bias_V, spec, config),
    )  # fmt: skip
    return lse, entropy


def tile_arguments(
    hidden_NH: Tensor, bias_V: Tensor | None, spec: LogitSpec, config: TileConfig
) -> dict[str, int | bool | str]:
    """The compile-time arguments both portable tile kernels share."""
    return {
        "HAS_BIAS": bias_V is not None,
        "HAS_CAP": spec.soft_cap is not None,
        "EVEN_K": hidden_NH.shape[1] % config.block_k == 0,
        "UPCAST": not hidden_NH.is_cuda,  # the interpreter multiplies the bits of bf16
        "PRECISION": "ieee",  # of float32 inputs only; bf16 and fp16 products are exact in float32
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
    """``[N]`` z of the targets."""
    num_rows, hidden_size = hidden_NH.shape
    out_N = torch.empty(num_rows, dtype=torch.float32, device=hidden_NH.device)
    target_kernel[(triton.cdiv(num_rows, 64),)](
        hidden_NH, weight_VH, weight_VH if bias_V is None else bias_V, targets_N, out_N, num_rows, weight_VH.shape[0],
        hidden_size, 1.0 / spec.temperature, spec.soft_cap or 1.0, HAS_BIAS=bias_V is not None,
        HAS_CAP=spec.soft_cap is not None, UPCAST=not hidden_NH.is_cuda, PRECISION="ieee", BLOCK_T=64,
        BLOCK_K=32 if hidden_NH.dtype == torch.float32 else 64, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out_N


def forward_rows(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    spec: LogitSpec,
    config: TileConfig | None,
    keep_bytes: int = 0,
) -> RowStats:
    """Statistics of every row, MAX_ROWS at a time; ``config`` None runs the Hopper kernel."""
    tile_columns = hopper.BLOCK_N if config is None else config.block_n
    num_rows = hidden_NH.shape[0]
    num_kept = 0
    if hidden_NH.dtype != torch.float16:  # small shares would vanish in fp16
        num_kept = kept_columns(num_rows, weight_VH.shape[0], hidden_NH.dtype.itemsize, keep_bytes, tile_columns)
    share_NK = hidden_NH.new_empty(num_rows, -(-num_kept // 8) * 8)[:, :num_kept] if num_kept else None
    pieces: list[tuple[Tensor, Tensor]] = []
    tile_lse: list[Tensor] = []
    for start in range(0, num_rows, MAX_ROWS):
        block_NH = hidden_NH[start : start + MAX_ROWS]
        share = None if share_NK is None else share_NK[start : start + MAX_ROWS]
        if config is None:
            tiles = hopper.tile_stats(block_NH, weight_VH, LOG2_E / spec.temperature, share)
        else:
            tiles = portable_tile_stats(block_NH, weight_VH, bias_V, spec, config, share)
        pieces.append(row_stats(*tiles))
        if share is not None:
            tile_lse.append(tiles[0][: -(-num_kept // tile_columns)].clone())
    lse_N, mean_z_N = pieces[0] if len(pieces) == 1 else (torch.cat(parts) for parts in zip(*pieces, strict=True))
    target_z_N = target_logits(hidden_NH, weight_VH, bias_V, targets_N, spec)
    kept = None
    if share_NK is not None:
        kept = Kept(share_NK=share_NK, tile_lse=tuple(tile_lse), tile_columns=tile_columns, rows_per_block=MAX_ROWS)
    return RowStats(lse_N=lse_N, mean_z_N=mean_z_N, target_z_N=target_z_N, kept=kept)
