"""Blockwise FP8, the format of DeepSeek-style checkpoints and of vLLM: 8-bit weights and one float32 scale per block.

``quantize_blocks`` is the arithmetic; ``Fp8Source`` wraps another source and quantizes its linear weights. A server
accepts them when its own checkpoint has this format (``quant_method: fp8`` with ``weight_block_size``).
"""

import torch
from torch import Tensor, nn

from ..manifest import TensorEntry, WeightManifest
from ..plan import Bucket, plan_buckets
from ..tensors import slot_view
from .base import TensorSource

BLOCK = 128
_E4M3_MAX = 448.0
_SCALE_SUFFIX = "_scale_inv"

#: Parts of the names of tensors that are not quantized: everything but linear layers, and routers, whose choices are
#: sensitive to rounding.
_NOT_QUANTIZED = ("embed", "lm_head", "norm", "mlp.gate.", "score")


def quantize_blocks(weight_OI: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Quantize ``weight_OI`` [out, in] (any float): float8_e4m3fn [out, in], float32 scales [out blocks, in blocks].

    Each ``block`` x ``block`` tile is divided by its scale, which is the tile's largest magnitude over 448, so every
    tile uses the full range; tiles at the lower and right edge may be smaller. The scales are what checkpoints call
    ``weight_scale_inv``: weight = 8-bit value * scale. A tile of zeros has scale 1.
    """
    num_out, num_in = weight_OI.shape
    tiles = _tiles(weight_OI.float(), block)
    largest = tiles.abs().amax(dim=(1, 3))
    scale_BC = torch.where(largest > 0, largest / _E4M3_MAX, torch.ones_like(largest))
    scaled = (tiles / scale_BC[:, None, :, None]).clamp(-_E4M3_MAX, _E4M3_MAX)
    fp8_OI = scaled.flatten(2).flatten(0, 1)[:num_out, :num_in].to(torch.float8_e4m3fn)
    return fp8_OI.contiguous(), scale_BC


def dequantize_blocks(fp8_OI: Tensor, scale_BC: Tensor, block: int = BLOCK) -> Tensor:
    """Inverse of ``quantize_blocks``, up to rounding: float32 [out, in]."""
    num_out, num_in = fp8_OI.shape
    tiles = _tiles(fp8_OI.float(), block) * scale_BC[:, None, :, None]
    return tiles.flatten(2).flatten(0, 1)[:num_out, :num_in].contiguous()


def _tiles(weight_OI: Tensor, block: int) -> Tensor:
    """[out blocks, block, in blocks, block], padded with zeros at the edges."""
    num_out, num_in = weight_OI.shape
    padded = nn.functional.pad(weight_OI, (0, -num_in % block, 0, -num_out % block))
    return padded.view(padded.shape[0] // block, block, padded.shape[1] // block, block)


class Fp8Source:
    """Sends the linear weights of ``source`` as 8-bit values and scales, and other tensors unchanged."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._entries: dict[str, TensorEntry] = {}

    def manifest(self) -> WeightManifest:
        """Each linear weight in 8 bits, followed by its scales."""
        entries = []
        self._entries = {entry.name: entry for entry in self._source.manifest().entries}
        for entry in self._entries.values():
            if _is_linear(entry):
                rows, columns = (-(-size // BLOCK) for size in entry.shape)
                entries.append(TensorEntry(name=entry.name, shape=entry.shape, dtype="float8_e4m3fn"))
                entries.append(TensorEntry(name=entry.name + _SCALE_SUFFIX, shape=(rows, columns), dtype="float32"))
            else:
                entries.append(entry)
        return WeightManifest.of(entries)

    def fill(self, bucket: Bucket, out: Tensor | None) -> None:
        """A weight whose scales are in the next bucket is gathered twice."""
        names = dict.fromkeys(slot.name.removesuffix(_SCALE_SUFFIX) for slot in bucket.slots)
        unquantized = plan_buckets(WeightManifest.of(self._entries[name] for name in names), 1 << 62).buckets[0]
        bytes_N = None if out is None else torch.empty(unquantized.nbytes, dtype=torch.uint8, device=out.device)
        self._source.fill(unquantized, bytes_N)
        if out is None or bytes_N is None:
            return
        values: dict[str, Tensor] = {}
        for slot in unquantized.slots:
            tensor = slot_view(bytes_N, slot)
            if _is_linear(self._entries[slot.name]):
                values[slot.name], values[slot.name + _SCALE_SUFFIX] = quantize_blocks(tensor)
            else:
                values[slot.name] = tensor
        for slot in bucket.slots:
            slot_view(out, slot).copy_(values[slot.name])


def _is_linear(entry: TensorEntry) -> bool:
    is_matrix = len(entry.shape) == 2 and entry.name.endswith(".weight") and "float" in entry.dtype
    return is_matrix and not any(part in entry.name for part in _NOT_QUANTIZED)
