"""Gradients of stage 3, from the backward pass to the optimizer: reduce-scatter and accumulation in few kernels.

DeepSpeed partitions each gradient separately, adds each separately to the gradients of earlier micro batches, and
copies all of them once more for the optimizer, in kernels that run faster than they are launched. Here one call
processes a whole bucket, or all gradients. The collectives and their contents are DeepSpeed's. The fp32 accumulator,
twice as large as the bf16 shards of the weights, is allocated only from the first gradient to the step.

With optimizer states on NVMe, gradients stay in CPU memory (`keep_nvme_gradients_in_memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import reduce_scatter_single
from ..upstream import FENCE

_PRIVATE = "_DeepSpeedZeroOptimizer_Stage3__"

_READERS = ("_get_fp32_grad_state_partition", "update_fp32_grad_for_param_vectorized", "offload_states")
"""Methods behind DeepSpeed's tools (`safe_get_full_grad`, ...) that may read the accumulator at any time."""

_STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
GRADIENTS = FENCE.patch(
    name="gradient accumulation of stage 3",
    reason="one call reduces and accumulates a bucket; the fp32 accumulator exists from the first gradient to the step",
    otherwise="stock path",
    replaces={
        _STAGE_3: (
            f"{_PRIVATE}avg_scatter_grads(params_to_reduce, communication_data_type)",
            "reduce_ready_partitions_and_remove_grads(param)",
            "partition_grads(params_to_release, grad_partitions)",
            "independent_gradient_partition_epilogue()",
            "_post_step(timer_names)",
            "_prepare_fp32_grad_for_sub_group(sub_group_id)",
            *_READERS,
        )
    },
    reads={
        _STAGE_3: (
            *("micro_step_id", "ipg_buckets", "reduce_bucket_size", "params_already_reduced", "averaged_gradients"),
            *("communication_data_type", "gradient_accumulation_dtype", "reduce_and_partition_stream", "fp16_groups"),
            *("grad_partitions_flat_buffer", "fp32_partitioned_groups_flat", "_epilogue_ran_this_backward"),
            f"{_PRIVATE}param_id_to_grad_partition",
            f"{_PRIVATE}reduce_and_partition_ipg_grads(communication_data_type)",
        ),
        "deepspeed.runtime.zero.stage3:IPGBucketZ3": ("params", "elements", "process_group"),
        "deepspeed.runtime.zero.partition_parameters": ("ds_id", "ds_numel", "ds_process_group"),
        "torch": ("_foreach_copy_", "_foreach_add_"),
    },
)
NVME_GRADIENTS = FENCE.patch(
    name="gradients of states on NVMe",
    reason="DeepSpeed reads gradients from the disk at offsets that direct I/O does not support, and steps with others",
    otherwise="refused",
    replaces={
        _STAGE_3: (
            "_offload_grad_partition_at_boundary(param, grad_buffer, offload_fp32_gradients, offload_fp32_offsets)",
        )
    },
    reads={
        _STAGE_3: (
            *("grad_position", "norm_for_param_grads", "fp32_partitioned_groups_flat", "optimizer_swapper"),
            *("get_param_id(param)", "_constant_buffered_norm2(input, buffer_size)"),
            "_swappable_optimizer_subgroup(sub_group_id)",
            f"{_PRIVATE}param_id_to_grad_partition",
        ),
        "deepspeed.runtime.swap_tensor.optimizer_utils:OptimizerSwapper": ("swap_params_info",),
        "deepspeed.runtime.swap_tensor.optimizer_utils:OptimizerStateSwapInfo": ("unswapped_gradients",),
    },
)


def fuse_zero3_gradients(zero_optimizer: Any) -> None:
    """Replace gradient reduction and accumulation of DeepSpeed's stage 3 optimizer.

    Args:
        zero_optimizer: of an engine whose settings have `EngineConfig.fuses_zero3_gradients`.
    """
    if not GRADIENTS.check():
        return
    methods: dict[str, Callable[..., Any]] = {
        f"{_PRIVATE}avg_scatter_grads": _reduce_scatter,
        "reduce_ready_partitions_and_remove_grads": partial(_add_to_bucket, zero_optimizer),
        "partition_grads": partial(_accumulate, zero_optimizer),
        "independent_gradient_partition_epilogue": partial(_end_backward, zero_optimizer),
        "_post_step": partial(_end_step, zero_optimizer, zero_optimizer._post_step),
    }
    if zero_optimizer.gradient_accumulation_dtype == torch.float32:
        methods["_prepare_fp32_grad_for_sub_group"] = partial(_pass_to_optimizer, zero_optimizer)
    for name in _READERS:
        methods[name] = partial(_read_accumulator, zero_optimizer, getattr(zero_optimizer, name))
    GRADIENTS.replace(zero_optimizer, **methods)
    _free_accumulator(zero_optimizer)


def _add_to_bucket(optimizer: Any, param: Any) -> None:
    """Add the gradient of `param` to its bucket, like DeepSpeed but without a stream wait for each gradient."""
    dtype = optimizer.communication_data_type
    bucket = optimizer.ipg_buckets[dtype]
    if bucket.params and bucket.elements + param.ds_numel > optimizer.reduce_bucket_size:
        _reduce_bucket(optimizer, dtype)
    bucket.params.append(param)
    bucket.process_group = param.ds_process_group
    bucket.elements += param.ds_numel


def _reduce_bucket(optimizer: Any, dtype: torch.dtype) -> None:
    _allocate_accumulator(optimizer)
    stream = optimizer.reduce_and_partition_stream
    if isinstance(stream, torch.cuda.Stream):
        stream.wait_stream(torch.cuda.current_stream())
    getattr(optimizer, f"{_PRIVATE}reduce_and_partition_ipg_grads")(dtype)


def _reduce_scatter(params: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
    """This rank's partitions of the mean gradients over ranks (the engine multiplies losses by their number), flat and
    without padding, computed in `dtype`."""
    gradients = [param.grad.view(-1) for param in params]
    group = params[0].ds_process_group
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    if world_size == 1:
        return gradients
    rows = [_by_rank(gradient, world_size) for gradient in gradients]
    flat = (torch.cat(rows, dim=1) if len(rows) > 1 else rows[0]).to(dtype).div_(world_size)
    reduce_scatter_single(flat[rank], flat.view(-1), group=group)
    partitions = flat[rank].split([row.shape[1] for row in rows])
    sizes = [_partition_size(gradient, world_size, rank) for gradient in gradients]
    return [part[:size] if len(part) > size else part for part, size in zip(partitions, sizes, strict=True)]


def _by_rank(gradient: Tensor, world_size: int) -> Tensor:
    """[world size, partition], padded at the end if the gradient is not divisible."""
    missing = -gradient.numel() % world_size
    if missing:
        gradient = torch.nn.functional.pad(gradient, (0, missing))
    return gradient.view(world_size, -1)


def _partition_size(gradient: Tensor, world_size: int, rank: int) -> int:
    """Elements of the rank's partition without padding."""
    size = -(-gradient.numel() // world_size)
    return max(0, min(size, gradient.numel() - rank * size))


def _accumulate(optimizer: Any, params: Sequence[Any], partitions: Sequence[Tensor]) -> list[Tensor]:
    """Add this rank's flat gradient partitions to the accumulator; the first micro batch overwrites it."""
    accumulators = getattr(optimizer, f"{_PRIVATE}param_id_to_grad_partition")
    stream = torch.cuda.current_stream() if partitions[0].is_cuda else None
    totals, new = [], []
    for param, partition in zip(params, partitions, strict=True):
        if stream is not None:
            param.grad.record_stream(stream)
        param.grad = None
        if partition.numel() > 0:  # otherwise the partition is only padding
            totals.append(accumulators[param.ds_id][: partition.numel()])
            new.append(partition)
    if totals and optimizer.micro_step_id == 0:
        torch._foreach_copy_(totals, new)
    elif totals:
        torch._foreach_add_(totals, [each.to(totals[0].dtype) for each in new])
    return totals


def _end_backward(optimizer: Any) -> None:
    """Reduce the remaining buckets. The computation waits for them on the device, not on the CPU."""
    for dtype in sorted(optimizer.ipg_buckets, key=str):
        _reduce_bucket(optimizer, dtype)
    stream = optimizer.reduce_and_partition_stream
    if isinstance(stream, torch.cuda.Stream):
        torch.cuda.current_stream().wait_stream(stream)
    optimizer.params_already_reduced = dict.fromkeys(optimizer.params_already_reduced, False)
    accumulators = getattr(optimizer, f"{_PRIVATE}param_id_to_grad_partition")
    for index, sub_group in enumerate(optimizer.fp16_groups):
        optimizer.averaged_gradients[index] = [accumulators[param.ds_id] for param in sub_group]
    optimizer._epilogue_ran_this_backward = True


def _pass_to_optimizer(optimizer: Any, sub_group_id: int) -> None:
    """Use the accumulator itself as the gradient: it has the order and length of the flat fp32 weights."""
    start = sum(len(flat) for flat in optimizer.fp32_partitioned_groups_flat[:sub_group_id])
    flat = optimizer.fp32_partitioned_groups_flat[sub_group_id]
    flat.grad = optimizer.grad_partitions_flat_buffer[start : start + len(flat)]
    optimizer.averaged_gradients[sub_group_id] = None


def _read_accumulator(optimizer: Any, reader: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call `reader` with the accumulator allocated; it reads zeros if there are no gradients."""
    _allocate_accumulator(optimizer)
    return reader(*args, **options)


def _end_step(optimizer: Any, post_step: Callable[..., None], *args: Any) -> None:
    post_step(*args)
    _free_accumulator(optimizer)


def _free_accumulator(optimizer: Any) -> None:
    """Free the accumulator's memory until the next gradients. Views stay valid; DeepSpeed keeps one per parameter."""
    optimizer.grad_partitions_flat_buffer.untyped_storage().resize_(0)


def _allocate_accumulator(optimizer: Any) -> None:
    """Allocate the accumulator on the stream of the backward pass, filled with zeros: padding is never written."""
    buffer: Tensor = optimizer.grad_partitions_flat_buffer
    storage = buffer.untyped_storage()
    if storage.nbytes() == 0:
        storage.resize_(buffer.numel() * buffer.element_size())
        buffer.zero_()


def keep_nvme_gradients_in_memory(zero_optimizer: Any) -> None:
    """Pass accumulated gradients to a stage 3 optimizer with states on NVMe from CPU memory instead of from the disk.

    DeepSpeed writes gradients of 1 MiB and more to the disk before the step and reads them into one buffer, each at its
    parameter's offset. If an offset is not a multiple of 512 bytes, the optimizer steps with wrong values (seen with
    0.19.8; correct if all are). Direct I/O requires such addresses, so the read presumably fails and the error is not
    checked. Every norm whose shard is not a multiple of 512 bytes shifts the offsets after it. The gradient that was
    written stays in CPU memory anyway (DeepSpeed never frees it), so using it costs no memory.

    Args:
        zero_optimizer: DeepSpeed's stage 3 optimizer with `offload.optimizer` "nvme".
    """
    NVME_GRADIENTS.check()
    original = zero_optimizer._offload_grad_partition_at_boundary
    accumulators: dict[int, Tensor] = getattr(zero_optimizer, f"{_PRIVATE}param_id_to_grad_partition")

    def offload(param: Any, gradient: Tensor, *to_write: dict[int, list[Any]]) -> None:
        param_id = zero_optimizer.get_param_id(param)
        group, offset, _ = zero_optimizer.grad_position[param_id]
        if not zero_optimizer._swappable_optimizer_subgroup(group):
            original(param, gradient, *to_write)
            return
        zero_optimizer.norm_for_param_grads[param_id] = zero_optimizer._constant_buffered_norm2(gradient)
        flat = zero_optimizer.fp32_partitioned_groups_flat[group]
        info = zero_optimizer.optimizer_swapper.swap_params_info[flat.ds_id]
        info.unswapped_gradients[offset] = accumulators[param.ds_id].narrow(0, 0, gradient.numel())

    NVME_GRADIENTS.replace(zero_optimizer, _offload_grad_partition_at_boundary=offload)
