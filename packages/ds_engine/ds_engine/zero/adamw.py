"""torch's fused AdamW, which divides gradients while it reads them."""

from typing import Any

import torch
from torch import Tensor


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True). Divides gradients by the 0-d tensor `grad_scale` if it is set."""

    grad_scale: Tensor | None = None

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, fused=True, **options)
