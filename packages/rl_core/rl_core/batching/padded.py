"""Between padded [B, L] rows with a mask and the flat [K] rows this package works on."""

from torch import Tensor

from .._tensors import require_same_shape
from ..errors import ShapeError

__all__ = ["flatten_padded", "pad_flat"]


def flatten_padded(values_BL: Tensor, mask_BL: Tensor) -> tuple[Tensor, Tensor]:
    """(values_K, lens_B): the values where the mask is set, row after row, and how many each row has. Differentiable.

    The mask may have holes (a tool's output inside a response) and be left- or right-padded.
    """
    require_same_shape(values_BL=values_BL, mask_BL=mask_BL)
    if mask_BL.dim() != 2:
        raise ShapeError(f"mask_BL has shape {tuple(mask_BL.shape)}; it must have two dimensions")
    mask = mask_BL.bool()
    return values_BL[mask], mask.sum(dim=1)


def pad_flat(values_K: Tensor, mask_BL: Tensor, *, fill: float = 0.0) -> Tensor:
    """The inverse: values put where the mask is set, `fill` elsewhere, [B, L]. Differentiable."""
    mask = mask_BL.bool()
    if values_K.shape != (int(mask.sum()),):
        raise ShapeError(f"values_K has shape {tuple(values_K.shape)}; the mask has {int(mask.sum())} places")
    padded = values_K.new_full(mask.shape, fill)
    return padded.masked_scatter(mask, values_K)
