"""What to do with responses that ran too long. Shapes: N samples."""

import torch
from torch import Tensor

__all__ = ["overlong_keep", "overlong_penalty"]


def overlong_penalty(
    response_lens_N: Tensor,
    *,
    max_length: int,
    buffer_length: int,
    penalty: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """DAPO's soft punishment to add to the scores, [N], from 0 down to -penalty.

        0                                          n <= max_length - buffer_length
        penalty * (max_length - buffer - n) / buffer_length   inside the buffer
        -penalty                                   n > max_length

    Lengths in tokens. Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, equation 13 (L_max, L_cache, penalty 1).
    """
    if not 0 < buffer_length <= max_length:
        raise ValueError(f"buffer_length={buffer_length}: must be between 1 and max_length={max_length}")
    if penalty < 0.0:
        raise ValueError(f"penalty={penalty}: must be at least 0")
    over = response_lens_N.to(torch.float64) - (max_length - buffer_length)
    return (-penalty * (over / buffer_length).clamp(0.0, 1.0)).to(dtype)


def overlong_keep(truncated_N: Tensor) -> Tensor:
    """DAPO's overlong filtering: bool [N], False for samples cut off at the length limit, to take out of the loss.

    Their score says the answer was missing, not that what was written was wrong. Give the others their advantages
    first, then set `response_lens` of these to 0 (or weight 0). Source: arXiv:2503.14476, section 3.4.
    """
    return ~truncated_N.bool()
