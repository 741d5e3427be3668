"""A checksum fast enough to run on every bucket, on the device that holds it."""

import torch
from torch import Tensor

from .plan import ALIGN_BYTES

_WORDS = ALIGN_BYTES // 8
_weights: dict[torch.device, Tensor] = {}


def checksum(bytes_N: Tensor) -> int:
    """64-bit checksum of a contiguous 1-D uint8 tensor whose length is a multiple of 256 bytes.

    Words of 64 bits are summed within blocks of 256 bytes and the blocks' sums weighted by an odd number that depends
    on their position, all modulo 2**64. Any single changed word, missing block, stale bucket or block out of place
    changes it; it is not meant to resist an adversary. Runs at memory speed and moves 8 bytes off the device.
    """
    if bytes_N.numel() == 0:
        return 0
    sums_B = bytes_N.view(torch.int64).view(-1, _WORDS).sum(1)
    return int((sums_B * _block_weights(sums_B.numel(), sums_B.device)).sum().item()) & 0xFFFF_FFFF_FFFF_FFFF


def _block_weights(num_blocks: int, device: torch.device) -> Tensor:
    weights = _weights.get(device)
    if weights is None or weights.numel() < num_blocks:
        index_B = torch.arange(num_blocks, dtype=torch.int64, device=device)
        weights = (index_B * 0x2545_F491_4F6C_DD1D) ^ (index_B << 17) | 1
        _weights[device] = weights
    return weights[:num_blocks]
