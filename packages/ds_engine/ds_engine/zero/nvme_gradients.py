"""Gradients of an optimizer on NVMe stay where stage 3 adds them up, in CPU memory.

DeepSpeed writes gradients of 1 MiB and more to the disk before the step and reads them into one buffer, each at its
parameter's offset. Where offsets are no multiples of 512 bytes the optimizer then steps with something else (seen with
0.19.8; where all are, it is right). Direct I/O needs such addresses: presumably the read fails and nobody looks. Models
have other offsets behind every norm whose share of a rank is not a multiple of 512 bytes. The sum that was written is
in CPU memory all the while (DeepSpeed never frees it), so it is read from there: nothing is lost, in memory or else.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["keep_gradients_in_memory"]


def keep_gradients_in_memory(optimizer: Any) -> None:
    """Let DeepSpeed's stage 3 optimizer with states on NVMe work as said above; any other object is left as it is."""
    if not getattr(optimizer, "swap_optimizer", False):
        return
    original = optimizer._offload_grad_partition_at_boundary
    sums: dict[int, Tensor] = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition

    def offload(param: Any, gradient: Tensor, *to_be_written: dict[int, list[Any]]) -> None:
        param_id = optimizer.get_param_id(param)
        group, offset, _ = optimizer.grad_position[param_id]
        if not optimizer._swappable_optimizer_subgroup(group):
            original(param, gradient, *to_be_written)
            return
        optimizer.norm_for_param_grads[param_id] = optimizer._constant_buffered_norm2(gradient)
        info = optimizer.optimizer_swapper.swap_params_info[optimizer.fp32_partitioned_groups_flat[group].ds_id]
        info.unswapped_gradients[offset] = sums[param.ds_id].narrow(0, 0, gradient.numel())

    optimizer._offload_grad_partition_at_boundary = offload
