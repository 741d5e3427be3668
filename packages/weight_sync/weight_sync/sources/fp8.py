"""Blockwise FP8 as DeepSeek-style checkpoints and vLLM keep it: 8-bit weights and one float32 scale a block.

``quantise_blocks`` is the arithmetic; ``Fp8Source`` puts it between a source and the wire. A server takes the result
when its own checkpoint is of that kind (``quant_method: fp8`` with ``weight_block_size``); others refuse it by name.
"""

import torch
from torch import Tensor, nn

from ..manifest import Manifest, TensorEntry
from ..plan import Bucket, plan_buckets
from .base import WeightSource, slot_view

BLOCK = 128
_LARGEST = 448.0  # of float8_e4m3fn
_SCALE = "_scale_inv"

#: Parts of names that stay in full precision: what is no linear layer, and a router, whose choices are delicate.
KEPT_WHOLE = ("embed", "lm_head", "norm", "mlp.gate.", "score")


def quantise_blocks(weight_OI: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """``weight_OI`` [out, in], any float, as float8_e4m3fn [out, in] and scales float32 [out blocks, in blocks].

    Each ``block`` x ``block`` tile is divided by its scale, its largest magnitude over 448, so that every tile uses the
    whole range; the tiles at the lower and right edge may be smaller. The weight is the product of both (the scales
    are what checkpoints call ``weight_scale_inv``). A tile of zeros has scale 1.
    """
    num_out, num_in = weight_OI.shape
    tiles = _tiles(weight_OI.float(), block)
    largest = tiles.abs().amax(dim=(1, 3))
    scale_BC = torch.where(largest > 0, largest / _LARGEST, torch.ones_like(largest))
    scaled = (tiles / scale_BC[:, None, :, None]).clamp(-_LARGEST, _LARGEST)
    eight_bits = scaled.flatten(2).flatten(0, 1)[:num_out, :num_in].to(torch.float8_e4m3fn)
    return eight_bits.contiguous(), scale_BC


def restore_blocks(eight_bits_OI: Tensor, scale_BC: Tensor, block: int = BLOCK) -> Tensor:
    """What the pair of ``quantise_blocks`` stands for, in float32."""
    num_out, num_in = eight_bits_OI.shape
    tiles = _tiles(eight_bits_OI.float(), block) * scale_BC[:, None, :, None]
    return tiles.flatten(2).flatten(0, 1)[:num_out, :num_in].contiguous()


def _tiles(weight_OI: Tensor, block: int) -> Tensor:
    """[out blocks, block, in blocks, block], filled up with zeros at the edges."""
    num_out, num_in = weight_OI.shape
    padded = nn.functional.pad(weight_OI, (0, -num_in % block, 0, -num_out % block))
    return padded.view(padded.shape[0] // block, block, padded.shape[1] // block, block)


class Fp8Source:
    """A source whose linear weights travel as 8-bit values and scales; the rest passes through."""

    def __init__(self, source: WeightSource, kept_whole: tuple[str, ...] = KEPT_WHOLE) -> None:
        self._source = source
        self._entries: dict[str, TensorEntry] = {}
        self._kept_whole = kept_whole

    def manifest(self) -> Manifest:
        """Each linear weight in 8 bits, followed by its scales."""
        entries = []
        self._entries = {entry.name: entry for entry in self._source.manifest().entries}
        for entry in self._entries.values():
            if self._is_linear(entry):
                rows, columns = (-(-size // BLOCK) for size in entry.shape)
                entries.append(TensorEntry(name=entry.name, shape=entry.shape, dtype="float8_e4m3fn"))
                entries.append(TensorEntry(name=entry.name + _SCALE, shape=(rows, columns), dtype="float32"))
            else:
                entries.append(entry)
        return Manifest.of(entries)

    def fill(self, bucket: Bucket, out: Tensor | None) -> None:
        """See WeightSource. A weight whose scales begin the next bucket is gathered twice."""
        names = dict.fromkeys(slot.name.removesuffix(_SCALE) for slot in bucket.slots)
        whole = plan_buckets(Manifest.of(self._entries[name] for name in names), 1 << 62).buckets[0]
        bytes_N = None if out is None else torch.empty(whole.nbytes, dtype=torch.uint8, device=out.device)
        self._source.fill(whole, bytes_N)
        if out is None or bytes_N is None:
            return
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for slot in whole.slots:
            tensor = slot_view(bytes_N, slot)
            pairs[slot.name] = quantise_blocks(tensor) if self._is_linear(self._entries[slot.name]) else (tensor,) * 2
        for slot in bucket.slots:
            slot_view(out, slot).copy_(pairs[slot.name.removesuffix(_SCALE)][slot.name.endswith(_SCALE)])

    def _is_linear(self, entry: TensorEntry) -> bool:
        is_matrix = len(entry.shape) == 2 and entry.name.endswith(".weight") and "float" in entry.dtype
        return is_matrix and not any(part in entry.name for part in self._kept_whole)
