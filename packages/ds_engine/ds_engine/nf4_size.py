"""Sizes of weights in NF4. Does not import torch, so that memory plans can use it."""

from .errors import ModelError

NF4_BLOCK = 64
"""Weights that share one fp32 scale in NF4."""
NF4_CHUNK = 65_536 * NF4_BLOCK
"""Weights quantized or dequantized at a time, which bounds the temporary memory."""


def nf4_bytes(num_weights: int) -> int:
    """Bytes of `num_weights` weights in NF4: half a byte per weight and 4 bytes per block for the scale.

    Raises:
        ModelError: the number is not a multiple of the block size.
    """
    if num_weights % NF4_BLOCK:
        raise ModelError(field="num_weights", value=num_weights, allowed=f"multiples of {NF4_BLOCK}, a block of NF4")
    return num_weights // 2 + num_weights // NF4_BLOCK * 4
