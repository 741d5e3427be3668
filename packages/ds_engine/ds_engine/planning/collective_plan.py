"""Collectives of a training step, as a pure function of the configuration and the number of micro batches.

The plan does not depend on a rank's data, so all ranks issue the same collectives. Tests compare it with recorded ones.

At stages 1 and 2 the plan needs the parameter sizes and the order in which gradients become ready. At stage 3 DeepSpeed
derives each gather from a trace of the model taken at run time, the same for every batch; the plan takes it as input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..config import EngineConfig
from ..errors import EngineConfigError
from .transfer_plan import HookCall, planned_transfers

FALLBACK_BUCKET_ELEMENTS = 500_000_000
"""Bucket of DeepSpeed's `buffered_allreduce_fallback`, which BF16_Optimizer uses. It cannot be configured."""


@dataclass(frozen=True, kw_only=True)
class PlannedCollective:
    """One collective of the default group."""

    operation: str
    dtype: str
    num_elements: int | None
    """None if it depends on the content (pickled metrics)."""


def planned_step(
    config: EngineConfig,
    *,
    parameter_sizes: Sequence[int],
    ready_order: Sequence[int],
    world_size: int,
    num_micro_batches: int,
    groups: Sequence[Sequence[int]] | None = None,
) -> list[PlannedCollective]:
    """Collectives of one `ZeroEngine.train_mini_batch` at stage 1 or 2, in order.

    Args:
        parameter_sizes: number of elements of each trainable parameter, in the model's order.
        ready_order: indices into `parameter_sizes` in the order in which gradients become ready (same for all batches).
        world_size: 2 or more; one rank alone skips some collectives.
        groups: indices into `parameter_sizes` of each parameter group of the optimizer; None: one group.

    Raises:
        ValueError: stage 3 (see `planned_zero3_steps`), sequence parallelism, or fewer than two ranks.
    """
    zero = config.zero
    if zero.stage == 3:
        raise EngineConfigError(field="zero.stage", value=3, allowed="1 or 2", remedy="use planned_zero3_steps")
    _check(config, world_size)
    groups = groups or [range(len(parameter_sizes))]
    plan = [_call("all_gather", "int64", 4 * world_size)]
    if config.uses_bf16_optimizer:
        sizes = list(_sums_above(parameter_sizes, FALLBACK_BUCKET_ELEMENTS))
    else:
        order = ready_order if zero.stage == 2 else [index for group in groups for index in group]
        # Unlike DeepSpeed, the engine's own accumulation does not split a gradient larger than a bucket.
        split_for = None if config.fuses_grad_accumulation else world_size
        sizes = list(_reduced_sizes(parameter_sizes, groups, order, config.reduce_bucket_elements, split_for))
    num_reductions = num_micro_batches if zero.stage == 2 else 1
    plan += [_call("all_reduce", config.reduce_dtype, size) for size in sizes] * num_reductions
    if not config.uses_bf16_optimizer:
        plan += _gradient_norm(config, len(groups))
    shards = [shard_elements(sum(parameter_sizes[index] for index in group), world_size) for group in groups]
    plan += [_call("all_gather_into_tensor", config.model_dtype, shard) for shard in shards]
    return plan + _shared_metrics(world_size)


def planned_zero3_steps(
    config: EngineConfig,
    *,
    hook_calls: Sequence[HookCall],
    parameter_sizes: Sequence[int],
    world_size: int,
    num_micro_batches: Sequence[int],
    groups: Sequence[Sequence[int]] | None = None,
) -> list[list[PlannedCollective]]:
    """Collectives of `ZeroEngine.train_mini_batch` at stage 3 for each step, starting with the first of a run.

    Args:
        hook_calls: DeepSpeed's hook calls in one micro batch, in order, the same for every batch.
        num_micro_batches: number of micro batches of each step.
        parameter_sizes, world_size, groups: as in `planned_step`; no parameter is frozen.

    Raises:
        ValueError: sequence parallelism, or fewer than two ranks.
    """
    _check(config, world_size)
    zero = config.zero
    persistent = [i for i, size in enumerate(parameter_sizes) if size <= zero.param_persistence_elements]
    steps = planned_transfers(
        hook_calls,
        parameter_sizes,
        persistent=frozenset(persistent),
        bucket=config.reduce_bucket_elements,
        prefetched=config.prefetch_elements,
        max_reuse_distance=config.reuse_elements,
        num_micro_batches=num_micro_batches,
    )

    def shards(parameters: Sequence[int]) -> int:
        return sum(-(-parameter_sizes[index] // world_size) for index in parameters)

    plans = []
    comparisons = _trace_comparisons(hook_calls)
    for micro_batches in steps:
        plan = [_call("all_gather", "int64", 4 * world_size)]
        for transfers in micro_batches:
            plan += next(comparisons, [])
            for transfer in transfers:
                num_elements = shards(transfer.parameters)
                if transfer.kind == "gather":
                    plan.append(_call("all_gather_into_tensor", config.model_dtype, num_elements))
                else:
                    plan.append(_call("reduce_scatter_tensor", config.reduce_dtype, num_elements * world_size))
        plan += _gradient_norm(config, len(groups or [()]))
        if persistent:
            plan.append(_call("all_gather_into_tensor", config.model_dtype, shards(persistent)))
        plan += _shared_metrics(world_size)
        plans.append(plan)
    return plans


def _trace_comparisons(hook_calls: Sequence[HookCall]) -> Iterator[list[PlannedCollective]]:
    """Broadcasts that compare the traces of DeepSpeed's ranks, before the first and the second micro batch of a run."""
    fetches = [call for call in hook_calls if call.kind == "fetch"]
    num_parameters = sum(len(call.parameters) for call in fetches)
    for lists in ([0], [len(fetches), num_parameters, num_parameters]):
        yield [_call("broadcast", "int64", size) for length in lists for size in (1, length)]


def _check(config: EngineConfig, world_size: int) -> None:
    if config.sequence_parallel > 1:
        raise EngineConfigError(field="sequence_parallel", value=config.sequence_parallel, allowed="1 in a plan")
    if world_size < 2:
        raise EngineConfigError(field="world_size", value=world_size, allowed="2 or more")


def _gradient_norm(config: EngineConfig, num_groups: int) -> list[PlannedCollective]:
    """All-reduces of the gradient norm: one for all groups if the engine computes it (`fuses_grad_norm`). Otherwise
    DeepSpeed first checks for inf and nan on any rank, at stage 3 in fp16 only, and then reduces the norm per group."""
    if config.fuses_grad_norm:
        return [_call("all_reduce", "float64", 1)]
    checks_overflow = config.model_dtype == "float16" or (config.model_dtype == "bfloat16" and config.zero.stage < 3)
    return [_call("all_reduce", "uint8", 1)] * checks_overflow + [_call("all_reduce", "float32", 1)] * num_groups


def _shared_metrics(world_size: int) -> list[PlannedCollective]:
    """Sizes of the pickled metrics, then the metrics."""
    return [_call("all_gather", "int64", world_size), _call("all_gather", "uint8", None)]


def _call(operation: str, dtype: str, num_elements: int | None) -> PlannedCollective:
    return PlannedCollective(operation=operation, dtype=dtype, num_elements=num_elements)


def shard_elements(num_elements: int, world_size: int) -> int:
    """Elements of one rank's shard of a parameter group at stages 1 and 2, with padding (4-byte aligned in bf16)."""
    alignment = 2 * world_size
    return -(-num_elements // alignment) * alignment // world_size


def _reduced_sizes(
    parameter_sizes: Sequence[int],
    groups: Sequence[Sequence[int]],
    order: Sequence[int],
    bucket: int,
    split_for: int | None,
) -> Iterator[int]:
    """Sizes of the reductions: gradients fill a bucket until the next one does not fit. A gradient larger than a bucket
    is reduced alone, split at the shard boundaries of `split_for` ranks (None: not split)."""
    filled = 0
    for index in order:
        size = parameter_sizes[index]
        if filled and filled + size > bucket:
            yield filled
            filled = 0
        if size > bucket and split_for is not None:
            (group,) = (list(g) for g in groups if index in g)
            laid_out = [parameter_sizes[i] for i in group]
            start = sum(laid_out[: group.index(index)])
            yield from _sums_above(_parts(start, size, shard_elements(sum(laid_out), split_for)), bucket)
        else:
            filled += size
    if filled:
        yield filled


def _parts(start: int, size: int, shard: int) -> Iterator[int]:
    """Lengths of the parts of [start, start + size) split at multiples of `shard`."""
    end = start + size
    while start < end:
        border = min(end, (start // shard + 1) * shard)
        yield border - start
        start = border


def _sums_above(sizes: Sequence[int] | Iterator[int], limit: int) -> Iterator[int]:
    """Sums of consecutive sizes; each sum ends with the size that takes it above `limit`."""
    total = 0
    for size in sizes:
        total += size
        if total > limit:
            yield total
            total = 0
    if total:
        yield total
