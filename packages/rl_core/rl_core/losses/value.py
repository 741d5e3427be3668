"""The value loss of the critic. Shapes: K response tokens; any other shape works too, as long as all tensors agree."""

import torch
from torch import Tensor

from .._tensors import require_same_shape, upcast
from ..errors import require


def value_loss(
    values_K: Tensor,
    returns_K: Tensor,
    old_values_K: Tensor | None = None,
    *,
    clip: float | None = 0.2,
) -> tuple[Tensor, Tensor]:
    """Half the squared error of the critic, with the new value clipped around the old one: (loss_K, clipped_K).

        V_c = old + clip(V - old, -clip, clip)
        loss = 1/2 max((V - R)^2, (V_c - R)^2)

    Without `clip` or `old_values_K` it is the plain squared error. `clipped_K` is bool: the bound was active, so the
    token has no gradient. The loss is at least float32; returns and old values get no gradient.
    Source: PPO2 in OpenAI baselines (2017); Huang et al. 2022, "The 37 implementation details of PPO", detail 9.
    Raises `ValueError` for `clip` not above 0, `ShapeError` for shapes that differ.
    """
    require(clip is None or clip > 0.0, "clip", clip, "above 0, or None")
    require_same_shape(values_K=values_K, returns_K=returns_K)
    values, returns = upcast(values_K, returns_K.detach())
    plain = 0.5 * (values - returns).square()
    if clip is None or old_values_K is None:
        return plain, torch.zeros_like(plain, dtype=torch.bool)
    require_same_shape(values_K=values_K, old_values_K=old_values_K)
    old_values = old_values_K.detach().to(values)
    change = values - old_values
    # within the bound use the value itself: old + (new - old) may differ from it by one rounding, and the token would
    # then count as clipped
    clipped_values = torch.where(change.abs() <= clip, values, old_values + change.clamp(-clip, clip))
    bounded = 0.5 * (clipped_values - returns).square()
    return torch.maximum(plain, bounded), (bounded > plain).detach()
