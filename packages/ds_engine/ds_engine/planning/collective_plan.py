"""Which collectives a training step issues, as a pure function of the configuration and the number of micro batches.

The point is what the plan does not depend on: a rank's data. Tests compare it with what was recorded.

Stages 1 and 2 are planned from the parameters' sizes and the order of their gradients. At stage 3 DeepSpeed decides on
each gather from a trace of the model that it takes at run time, the same for every batch: given that, all is planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..config import EngineConfig
from .transfer_plan import Visit, planned_transfers

__all__ = ["PlannedCollective", "planned_step", "planned_zero3_steps"]

_FALLBACK_BUCKET_ELEMENTS = 500_000_000


@dataclass(frozen=True, kw_only=True)
class PlannedCollective:
    """One collective of the default group."""

    operation: str
    dtype: str
    num_elements: int | None
    """None where it depends on what is sent (pickled metrics)."""


def planned_step(
    config: EngineConfig,
    *,
    parameter_sizes: Sequence[int],
    ready_order: Sequence[int],
    world_size: int,
    num_micro_batches: int,
    groups: Sequence[Sequence[int]] | None = None,
) -> list[PlannedCollective]:
    """Everything `ZeroEngine.train_mini_batch` issues.

    Args:
        parameter_sizes: elements of each trained parameter, in the model's order.
        ready_order: indices into it, in the order the backward pass finishes gradients (the same for every batch).
        world_size: 2 or more; one rank alone leaves some out.
        groups: indices into `parameter_sizes` of each of the optimizer's parameter groups; None: all in one.

    Raises:
        ValueError: stage 3 (see `planned_zero3_steps`), sequence parallelism, or fewer than two ranks.
    """
    zero = config.zero
    if zero.stage == 3:
        raise ValueError("stage 3 goes by its trace: planned_zero3_steps plans it")
    _check(config, world_size)
    groups = groups or [range(len(parameter_sizes))]
    plan = [_call("all_gather", "int64", 4 * world_size)]
    if config.uses_bf16_optimizer:
        sizes = list(_cut_after(parameter_sizes, _FALLBACK_BUCKET_ELEMENTS))
    else:
        order = ready_order if zero.stage == 2 else [index for group in groups for index in group]
        # The engine's own gradient accumulation does not split a gradient larger than a bucket.
        cut_for = None if config.fuses_grad_accumulation else world_size
        sizes = list(_reduced_sizes(parameter_sizes, groups, order, config.reduce_bucket_elements, cut_for))
    num_reductions = num_micro_batches if zero.stage == 2 else 1
    plan += [_call("all_reduce", config.reduce_dtype, size) for size in sizes] * num_reductions
    if not config.uses_bf16_optimizer:
        plan += _gradient_norm(config, len(groups))
    shards = [_shard_size([parameter_sizes[index] for index in group], world_size) for group in groups]
    plan += [_call("all_gather_into_tensor", config.dtype, shard) for shard in shards]
    return plan + _shared_metrics(world_size)


def planned_zero3_steps(
    config: EngineConfig,
    *,
    visits: Sequence[Visit],
    parameter_sizes: Sequence[int],
    world_size: int,
    num_micro_batches: Sequence[int],
    groups: Sequence[Sequence[int]] | None = None,
) -> list[list[PlannedCollective]]:
    """Everything that `ZeroEngine.train_mini_batch` issues at stage 3, for each step from the first of a run on.

    Args:
        visits: DeepSpeed's hooks in one micro batch, in order (the same for every batch).
        num_micro_batches: of each step.
        parameter_sizes, world_size, groups: as for `planned_step`; nothing is frozen.

    Raises:
        ValueError: sequence parallelism, or fewer than two ranks.
    """
    _check(config, world_size)
    zero = config.zero
    persistent = [i for i, size in enumerate(parameter_sizes) if size <= zero.param_persistence_elements]
    steps = planned_transfers(
        visits,
        parameter_sizes,
        persistent=frozenset(persistent),
        bucket=config.reduce_bucket_elements,
        num_micro_batches=num_micro_batches,
    )

    def shards(parameters: Sequence[int]) -> int:
        return sum(-(-parameter_sizes[index] // world_size) for index in parameters)

    plans = []
    comparisons = _compared_traces(visits)
    for micro_batches in steps:
        plan = [_call("all_gather", "int64", 4 * world_size)]
        for transfers in micro_batches:
            plan += next(comparisons, [])
            for transfer in transfers:
                num_elements = shards(transfer.parameters)
                if transfer.kind == "gather":
                    plan.append(_call("all_gather_into_tensor", config.dtype, num_elements))
                else:
                    plan.append(_call("reduce_scatter_tensor", config.reduce_dtype, num_elements * world_size))
        plan += _gradient_norm(config, len(groups or [()]))
        if persistent:
            plan.append(_call("all_gather_into_tensor", config.dtype, shards(persistent)))
        plan += _shared_metrics(world_size)
        plans.append(plan)
    return plans


def _compared_traces(visits: Sequence[Visit]) -> Iterator[list[PlannedCollective]]:
    """What DeepSpeed sends before the first and the second micro batch of a run, so that ranks compare their traces."""
    fetches = [visit for visit in visits if visit.kind == "fetch"]
    num_parameters = sum(len(visit.parameters) for visit in fetches)
    for lists in ([0], [len(fetches), num_parameters, num_parameters]):
        yield [_call("broadcast", "int64", size) for length in lists for size in (1, length)]


def _check(config: EngineConfig, world_size: int) -> None:
    if config.sequence_parallel > 1:
        raise ValueError("all-to-alls of sequence parallelism are not planned: use sequence_parallel=1")
    if world_size < 2:
        raise ValueError(f"world_size={world_size} is not allowed: 2 or more")


def _gradient_norm(config: EngineConfig, num_groups: int) -> list[PlannedCollective]:
    """Squared norms of the shards: of all groups together if the engine itself computes them; else
    DeepSpeed first asks whether any rank holds an inf or nan, at stage 3 in fp16 only."""
    if config.fuses_grad_norm:
        return [_call("all_reduce", "float64", 1)]
    checks_overflow = config.dtype == "float16" or (config.dtype == "bfloat16" and config.zero.stage < 3)
    return [_call("all_reduce", "uint8", 1)] * checks_overflow + [_call("all_reduce", "float32", 1)] * num_groups


def _shared_metrics(world_size: int) -> list[PlannedCollective]:
    """Sizes of the pickled metrics, then these."""
    return [_call("all_gather", "int64", world_size), _call("all_gather", "uint8", None)]


def _call(operation: str, dtype: str, num_elements: int | None) -> PlannedCollective:
    return PlannedCollective(operation=operation, dtype=dtype, num_elements=num_elements)


def _shard_size(parameter_sizes: Sequence[int], world_size: int) -> int:
    """A rank's part of a group's parameters laid end to end, padded to equal parts, 4-byte aligned in bf16."""
    alignment = 2 * world_size
    return -(-sum(parameter_sizes) // alignment) * alignment // world_size


def _reduced_sizes(
    parameter_sizes: Sequence[int],
    groups: Sequence[Sequence[int]],
    order: Sequence[int],
    bucket: int,
    cut_for: int | None,
) -> Iterator[int]:
    """Gradients fill a bucket until the next does not fit; one larger than it goes alone, cut at the borders of the
    shards of `cut_for` ranks."""
    filled = 0
    for index in order:
        size = parameter_sizes[index]
        if filled and filled + size > bucket:
            yield filled
            filled = 0
        if size > bucket and cut_for is not None:
            (group,) = (list(g) for g in groups if index in g)
            laid_out = [parameter_sizes[i] for i in group]
            start = sum(laid_out[: group.index(index)])
            yield from _cut_after(_parts(start, size, _shard_size(laid_out, cut_for)), bucket)
        else:
            filled += size
    if filled:
        yield filled


def _parts(start: int, size: int, shard: int) -> Iterator[int]:
    """Lengths of [start, start + size) cut at multiples of `shard`."""
    end = start + size
    while start < end:
        border = min(end, (start // shard + 1) * shard)
        yield border - start
        start = border


def _cut_after(sizes: Sequence[int] | Iterator[int], limit: int) -> Iterator[int]:
    """Sums of consecutive sizes, each closed by the size that takes it beyond `limit`."""
    total = 0
    for size in sizes:
        total += size
        if total > limit:
            yield total
            total = 0
    if total:
        yield total
