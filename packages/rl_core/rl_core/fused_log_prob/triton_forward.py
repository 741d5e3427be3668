"""Forward pass on the GPU: tiles give ``[tiles, N]`` partial statistics, which are reduced to rows. No atomics."""

import torch
import triton
from torch import Tensor

from . import hopper
from .tiles import KeepPlan, TileConfig, plan_keeping
from .triton_kernels import combine_kernel, target_kernel, tile_stats_kernel
from .types import Keeping, Kept, LogitInputs, RowStats, ShareOutput

MAX_ROWS = 16384  # rows of one launch; bounds the partial statistics, 78 MB at 151,936 columns
GROUP_M = 8
REFERENCE_COLUMNS = 64  # enough for the largest logit to be within MARGIN_BITS of lse in nearly all rows


def portable_tile_stats(
    lse: Tensor, entropy: Tensor, inputs: LogitInputs, config: TileConfig, share: ShareOutput | None
) -> None:
    """Fill ``[tiles, N]`` log2-sum-exp2 and entropy in bits per ``config.block_n`` columns, and ``share`` (Kept)."""
    tile_stats_kernel[num_tiles(inputs, config)](
        *factor_pointers(inputs), lse if share is None else share.reference_N, lse, entropy,
        lse if share is None else share.out_NC, *inputs.shape, 0 if share is None else share.out_NC.stride(0),
        inputs.spec.bits, inputs.spec.soft_cap or 1.0, KEEP=share is not None, **tile_arguments(inputs, config),
    )  # fmt: skip


def num_tiles(inputs: LogitInputs, config: TileConfig) -> tuple[int]:
    """The launch grid of both portable tile kernels."""
    num_rows, num_columns, _ = inputs.shape
    return (triton.cdiv(num_rows, config.block_m) * triton.cdiv(num_columns, config.block_n),)


def factor_pointers(inputs: LogitInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden, weight and bias; any tensor where there is no bias, which a kernel then does not read."""
    return inputs.hidden_NH, inputs.weight_VH, inputs.weight_VH if inputs.bias_V is None else inputs.bias_V


def logit_arguments(inputs: LogitInputs) -> dict[str, bool | str]:
    """The compile-time arguments of all portable kernels that compute logits."""
    return {
        "HAS_BIAS": inputs.bias_V is not None,
        "HAS_CAP": inputs.spec.soft_cap is not None,
        "UPCAST": not inputs.hidden_NH.is_cuda,  # the interpreter cannot multiply bf16
        "PRECISION": "ieee",  # affects float32 inputs only; bf16 and fp16 products are exact in float32
    }


def tile_arguments(inputs: LogitInputs, config: TileConfig) -> dict[str, int | bool | str]:
    """The compile-time arguments of both portable tile kernels."""
    return {
        **logit_arguments(inputs),
        "EVEN_K": inputs.shape[2] % config.block_k == 0,
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


def target_logits(inputs: LogitInputs) -> Tensor:
    """z of the targets, ``[N]``."""
    num_rows, spec, dtype = inputs.shape[0], inputs.spec, inputs.hidden_NH.dtype
    out_N = torch.empty(num_rows, dtype=torch.float32, device=inputs.hidden_NH.device)
    target_kernel[(triton.cdiv(num_rows, 64),)](
        *factor_pointers(inputs), inputs.targets_N, out_N, *inputs.shape, 1.0 / spec.temperature, spec.soft_cap or 1.0,
        BLOCK_T=64, BLOCK_K=32 if dtype == torch.float32 else 64, num_warps=4, num_stages=3, **logit_arguments(inputs),
    )  # fmt: skip
    return out_N


def tile_buffers(num_rows: int, num_columns: int, tile_columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Uninitialized lse and entropy of every tile and row, ``[tiles, N]`` each."""
    lse, entropy = torch.empty(2, triton.cdiv(num_columns, tile_columns), num_rows, dtype=torch.float32, device=device)
    return lse, entropy


def row_references(inputs: LogitInputs) -> Tensor:
    """Kept.reference_N: the largest of the first logits of each row, in bits. It need not be precise."""
    logits_NC = inputs.hidden_NH @ inputs.weight_VH[:REFERENCE_COLUMNS].T
    return logits_NC.amax(1).float() * inputs.spec.bits


def forward_rows(inputs: LogitInputs, config: TileConfig | None, keeping: Keeping) -> RowStats:
    """Statistics of every row, MAX_ROWS at a time; ``config`` None runs the Hopper kernel."""
    hidden_NH, (num_rows, vocab, hidden_size), dtype = inputs.hidden_NH, inputs.shape, inputs.hidden_NH.dtype
    tile_columns = hopper.BLOCK_N if config is None else config.block_n
    if config is None:
        inputs = hopper.corrected(inputs)
    plan = KeepPlan()
    if dtype != torch.float16:  # small shares would underflow in fp16
        plan = plan_keeping(num_rows, vocab, hidden_size, dtype.itemsize, tile_columns, keeping)
    shares, grad_memory_VH = _kept_blocks(plan, hidden_NH, inputs.weight_VH)
    kept_tiles = triton.cdiv(sum(share_NC.shape[1] for share_NC in shares), tile_columns)
    whole = plan.whole and inputs.bias_V is None and inputs.spec.soft_cap is None
    if whole:
        reference_N = row_references(inputs)
    else:  # so low that every tile has its own base
        reference_N = hidden_NH.new_full((num_rows,), -1.0e30, dtype=torch.float32)
    pieces: list[tuple[Tensor, Tensor]] = []
    tile_lse: list[Tensor] = []
    for start in range(0, num_rows, MAX_ROWS):
        rows = slice(start, start + MAX_ROWS)
        tiles = tile_buffers(hidden_NH[rows].shape[0], vocab, tile_columns, hidden_NH.device)
        first = 0
        for share_NC in (*shares, None):
            stop = vocab if share_NC is None else first + share_NC.shape[1]
            if stop > first:
                share = None if share_NC is None else ShareOutput(out_NC=share_NC[rows], reference_N=reference_N[rows])
                _column_stats(tiles, inputs.rows(rows).columns(first, stop), config, share)
            first = stop
        pieces.append(row_stats(*tiles))
        if shares:
            tile_lse.append(tiles[0][:kept_tiles].clone())
    lse_N, mean_z_N = pieces[0] if len(pieces) == 1 else (torch.cat(parts) for parts in zip(*pieces, strict=True))
    target_z_N = target_logits(inputs)
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
    tiles: tuple[Tensor, Tensor], block: LogitInputs, config: TileConfig | None, share: ShareOutput | None
) -> None:
    """Fill the part of ``tiles`` that belongs to a block of columns, which starts at a tile."""
    tile_columns = hopper.BLOCK_N if config is None else config.block_n
    first = block.first_column // tile_columns
    lse, entropy = (part[first : first + triton.cdiv(block.shape[1], tile_columns)] for part in tiles)
    if config is None:
        hopper.tile_stats(lse, entropy, block, share)
    else:
        portable_tile_stats(lse, entropy, block, config, share)
