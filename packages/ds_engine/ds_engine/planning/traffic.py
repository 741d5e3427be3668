"""Bytes that ranks exchange in training, before a model is loaded: the planned collectives, added up. Pure functions.

Sizes are those of whole buffers: the gathered result of an all-gather, the input of a reduce-scatter or an all-reduce.
How many of these bytes a link carries depends on the algorithm of the collective and on the hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from ..config import EngineConfig, check_heads, kv_copies
from ..dtypes import Dtype, dtype_bytes
from .collective_plan import PlannedCollective, planned_step, planned_zero3_steps
from .model_shape import FAMILIES, ModelShape
from .transfer_plan import HookCall


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of the collectives over all ranks, by kind."""

    all_gather: int = 0
    """Gathered results."""
    reduce_scatter: int = 0
    """Inputs of one rank."""
    all_reduce: int = 0
    """Inputs of one rank."""


def update_traffic(
    shape: ModelShape, config: EngineConfig, *, world_size: int, num_micro_batches: int
) -> tuple[Traffic, Traffic]:
    """Collectives over all ranks of one `ZeroEngine.train_mini_batch`, from the second on.

    Sequence-parallel ranks share the states as all others do; their all-to-alls are `exchanged_bytes`. Comparisons of
    metadata, metrics and norms are left out.

    Args:
        world_size: all ranks, dp x sp; with one rank nothing is sent.

    Returns:
        Those of all micro batches, which overlap with computation, and those after the last backward pass.

    Raises:
        ValueError: an architecture whose parameters are counted only, or adapters (LoRA).
    """
    sizes, hook_calls = model_hook_calls(shape, config)
    if config.lora is not None:
        raise ValueError("lora is set; allowed: null, the traffic of adapters is not planned")
    if world_size == 1:
        return Traffic(), Traffic()
    alone = replace(config, sequence_parallel=1)
    if config.zero.stage < 3:
        order = range(len(sizes))[::-1]
        plan = planned_step(
            alone,
            parameter_sizes=sizes,
            ready_order=order,
            world_size=world_size,
            num_micro_batches=num_micro_batches,
            groups=list(config.optim.decay_groups(len(weight.shape) for weight in shape.weights()).values()),
        )
        reductions = [call for call in plan if call.operation == "all_reduce" and call.dtype == config.reduce_dtype]
        gathers = [call for call in plan if call.operation == "all_gather_into_tensor"]
        if config.zero.stage == 1:
            return Traffic(), _sum([*reductions, *gathers], world_size)
        return _sum(reductions, world_size), _sum(gathers, world_size)
    _, plan = planned_zero3_steps(
        alone,
        hook_calls=hook_calls,
        parameter_sizes=sizes,
        world_size=world_size,
        num_micro_batches=[num_micro_batches] * 2,
    )
    transfers = [call for call in plan if call.operation in ("all_gather_into_tensor", "reduce_scatter_tensor")]
    # The step gathers the parameters that stay gathered again, in its last all-gather.
    stays = any(size <= config.zero.param_persistence_elements for size in sizes)
    last = len(transfers) - stays
    return _sum(transfers[:last], world_size), _sum(transfers[last:], world_size)


def forward_traffic(shape: ModelShape, config: EngineConfig, *, world_size: int) -> Traffic:
    """Collectives over all ranks of one micro batch without gradients: stage 3 gathers every weight.

    An upper bound from the second micro batch on: DeepSpeed keeps up to 1e9 elements gathered.
    """
    if config.zero.stage < 3 or world_size == 1:
        return Traffic()
    threshold = config.zero.param_persistence_elements
    shards = sum(-(-weight.size // world_size) for weight in shape.weights() if weight.size > threshold)
    return Traffic(all_gather=shards * world_size * dtype_bytes(config.model_dtype))


def exchanged_bytes(shape: ModelShape, config: EngineConfig, *, tokens: int) -> int:
    """Bytes that a rank sends to the others of its sequence-parallel group in the forward pass of `tokens` tokens.

    Two all-to-alls a layer: queries, keys and values before attention, its output after it (Jacobs et al.,
    arXiv:2309.14509). The backward pass sends as much again, and so does recomputation.

    Args:
        tokens: packed tokens of the micro batch, of which each rank of the group has its share.

    Raises:
        EngineConfigError: `config.sequence_parallel` does not divide the attention heads.
    """
    sp = config.sequence_parallel
    if sp == 1:
        return 0
    check_heads(shape.num_heads, sp)
    copies = kv_copies(shape.num_heads, shape.num_kv_heads, sp)
    features = 2 * shape.query_width + 2 * shape.kv_width * copies
    share = -(-tokens // sp)
    return shape.num_layers * share * features * dtype_bytes(config.model_dtype) * (sp - 1) // sp


def model_hook_calls(shape: ModelShape, config: EngineConfig) -> tuple[list[int], list[HookCall]]:
    """Sizes of the parameters, and the hook calls of a micro batch, of a model whose layers are gathered whole.

    A recomputed layer is fetched a second time in its backward pass; its second forward pass ends before the release.

    Raises:
        ValueError: the architecture is none of the known families.
    """
    if not shape.is_exact:
        raise ValueError(f"the order of this architecture's modules is not known; allowed: {', '.join(FAMILIES)}")
    sizes = [weight.size for weight in shape.weights()]
    own = list(_modules(shape, len(sizes)))
    calls: list[HookCall] = []
    for number, parameters in enumerate(own):
        calls += _visit(number, parameters, gradients=())
    for number, parameters in reversed(list(enumerate(own))):
        # A tied head's gradient is that of the embedding, whose backward pass comes last.
        is_tied_head = shape.tied and number == len(own) - 1
        visit = list(_visit(number, parameters, gradients=() if is_tied_head else parameters))
        calls += [*visit[:1] * _is_recomputed(shape, config, number - 1), *visit]
    return sizes, calls[:-1]  # nothing follows the embedding's backward pass


def _modules(shape: ModelShape, num_parameters: int) -> Iterator[tuple[int, ...]]:
    """The parameters of embedding, layers, last norm and head, in the order of the forward pass."""
    num_last = 1 if shape.tied else 2
    of_layer = (num_parameters - 1 - num_last) // shape.num_layers
    yield (0,)
    for first in range(1, 1 + of_layer * shape.num_layers, of_layer):
        yield tuple(range(first, first + of_layer))
    yield (num_parameters - num_last,)
    yield (0,) if shape.tied else (num_parameters - 1,)


def _is_recomputed(shape: ModelShape, config: EngineConfig, layer: int) -> bool:
    return (
        bool(config.gradient_checkpointing) and 0 <= layer < shape.num_layers and layer % config.checkpoint_every == 0
    )


def _visit(number: int, parameters: tuple[int, ...], *, gradients: tuple[int, ...]) -> Iterator[HookCall]:
    yield HookCall(kind="fetch", submodule=number, parameters=parameters)
    for index in gradients:
        yield HookCall(kind="gradient", parameters=(index,))
    yield HookCall(kind="release", submodule=number, parameters=parameters)


def _sum(plan: Sequence[PlannedCollective], world_size: int) -> Traffic:
    """Bytes of the collectives whose sizes are known."""

    def of(operation: str) -> int:
        calls = [call for call in plan if call.operation == operation and call.num_elements is not None]
        return sum((call.num_elements or 0) * dtype_bytes(cast("Dtype", call.dtype)) for call in calls)

    return Traffic(
        all_gather=of("all_gather_into_tensor") * world_size,
        reduce_scatter=of("reduce_scatter_tensor"),
        all_reduce=of("all_reduce"),
    )
