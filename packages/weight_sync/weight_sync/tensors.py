"""Tensors inside a bucket: dtypes, views and checksums."""

import torch
from torch import Tensor

from .plan import ALIGN_BYTES, Slot

_WORDS = ALIGN_BYTES // 8
_ROW_BYTES = 64 * ALIGN_BYTES
_CPU_WEIGHTS: dict[torch.device, Tensor] = {}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """``bfloat16`` -> ``torch.bfloat16``, for a dtype of a manifest."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def slot_view(bytes_N: Tensor, slot: Slot) -> Tensor:
    """View of the slot's tensor, with its shape and dtype, inside the bucket's bytes (uint8, 1-D)."""
    return bytes_N[slot.offset : slot.offset + slot.nbytes].view(torch_dtype(slot.dtype)).view(slot.shape)


def checksum(bytes_N: Tensor) -> int:
    """64-bit checksum of a contiguous 1-D uint8 tensor whose length is a multiple of 256 bytes, on its device.

    The sum of the 64-bit words of each 256-byte block is weighted by an odd number that depends on the block's
    position; all modulo 2**64. It detects any single changed word, a missing block, a stale bucket and swapped blocks;
    it does not resist an adversary. Runs at memory speed and copies 8 bytes to the host.
    """
    if bytes_N.numel() == 0:
        return 0
    sums_B = bytes_N.view(torch.int64).view(-1, _WORDS).sum(1)
    return int((sums_B * _block_weights(sums_B.numel(), sums_B.device)).sum().item()) & 0xFFFF_FFFF_FFFF_FFFF


def _block_weights(num_blocks: int, device: torch.device) -> Tensor:
    """Kept for the CPU only: a tensor made while vLLM loads its model on a GPU loses its contents when vLLM sleeps."""
    weights = _CPU_WEIGHTS.get(device)
    if weights is None or weights.numel() < num_blocks:
        index_B = torch.arange(num_blocks, dtype=torch.int64, device=device)
        weights = (index_B * 0x2545_F491_4F6C_DD1D) ^ (index_B << 17) | 1
        if device.type == "cpu":
            _CPU_WEIGHTS[device] = weights
    return weights[:num_blocks]


def digest(tensor: Tensor) -> tuple[int, int]:
    """Checksums of any tensor's contents by blocks and by positions in larger ones: detects exchanged elements, too."""
    bytes_N = as_bytes(tensor)
    if bytes_N.numel() % _ROW_BYTES:
        bytes_N = torch.nn.functional.pad(bytes_N, (0, -bytes_N.numel() % _ROW_BYTES))
    sums_W = bytes_N.view(torch.int64).view(-1, _ROW_BYTES // 8).sum(0)
    return checksum(bytes_N), int((sums_W * _block_weights(sums_W.numel(), sums_W.device)).sum().item())


def num_wrong_bytes(actual: Tensor, expected: Tensor) -> int:
    """Number of bytes that differ between two tensors of one shape and dtype."""
    return int((as_bytes(actual) != as_bytes(expected)).sum())


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's contents, uint8, 1-D."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def storage_id(tensor: Tensor) -> int:
    """Equal for tensors that share a storage, also on the meta device."""
    return int(tensor.untyped_storage()._cdata)


def synchronize(device: torch.device) -> None:
    """Wait for the current stream of a GPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def like(origin: Tensor, values: Tensor) -> Tensor:
    """``values`` with the shape, class and attributes (including vLLM's weight loaders) of ``origin``."""
    tensor = values.view(origin.shape)
    tensor.__class__ = origin.__class__
    tensor.__dict__ = origin.__dict__.copy()
    return tensor
