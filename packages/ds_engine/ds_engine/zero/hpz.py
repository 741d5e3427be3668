"""hpZ (ZeRO++): a second shard of each parameter within a node, from the first forward pass of a step to its end.

DeepSpeed makes them when it releases a parameter for the first time in a step; later gathers (`zero3_gather`), such as
those of the backward pass, then stay within the node. Source: Wang et al., ZeRO++, arXiv:2306.10209.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..config import EngineConfig, check_divides
from ..upstream import FENCE

_GROUPS = "deepspeed.utils.groups"
NODE_GROUPS = FENCE.patch(
    name="groups of hpZ",
    reason="DeepSpeed refuses the second engine of a process, such as a critic or a reference",
    otherwise="stock path",
    replaces={_GROUPS: ("_create_zero_param_parallel_group(group_size)",)},
    reads={_GROUPS: ("_ZERO_PARAM_INTRA_PARALLEL_GROUP",)},
)


def prepare_hpz(config: EngineConfig) -> None:
    """Check the size of hpZ's groups and let several engines of this process use them; does nothing without hpZ.

    Raises:
        EngineConfigError: the size does not divide the number of ranks.
    """
    if config.hpz_ranks == 1:
        return
    check_divides("zero.deepspeed.zero_hpz_partition_size", config.hpz_ranks, dist.get_world_size(), "ranks")
    from deepspeed.utils import groups

    create: Any = groups._create_zero_param_parallel_group
    if not NODE_GROUPS.check() or create.__module__ != groups.__name__:
        return  # it is replaced already

    def once(group_size: int) -> None:
        group = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP
        if group is None or dist.get_world_size(group) != group_size:
            groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
            create(group_size)

    NODE_GROUPS.replace(groups, _create_zero_param_parallel_group=once)
