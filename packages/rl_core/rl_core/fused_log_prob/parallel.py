"""Vocabulary parallelism: each rank of a group holds ``V / world_size`` rows of the weight and all hidden states."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from .types import RowStats


def local_targets(targets_N: Tensor, num_local_rows: int, group: dist.ProcessGroup) -> Tensor:
    """Targets relative to this rank's first row, -1 where another rank holds them. All ranks hold equally many rows."""
    local_N = targets_N - dist.get_rank(group) * num_local_rows
    return torch.where((local_N >= 0) & (local_N < num_local_rows), local_N, -1)


def reduce_stats(stats: RowStats, group: dist.ProcessGroup) -> RowStats:
    """Statistics over the whole vocabulary from those of each rank: two all-reduces, of ``[N]`` and ``[3, N]``."""
    peak_N = stats.lse_N.clone()
    dist.all_reduce(peak_N, op=dist.ReduceOp.MAX, group=group)
    share_N = torch.exp(stats.lse_N - peak_N)
    sums_3N = torch.stack((share_N, share_N * stats.mean_z_N, stats.target_z_N))
    dist.all_reduce(sums_3N, group=group)
    return replace(stats, lse_N=peak_N + sums_3N[0].log(), mean_z_N=sums_3N[1] / sums_3N[0], target_z_N=sums_3N[2])
