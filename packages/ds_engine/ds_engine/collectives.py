"""Two of torch.distributed's functions under the names that torch 2.13 gave them; it warns at every use of the old."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["all_gather_single", "reduce_scatter_single"]

_dist: Any = dist
all_gather_single = getattr(dist, "all_gather_single", None) or _dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor
