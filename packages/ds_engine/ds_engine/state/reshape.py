"""Loads a training state into another layout: number of ranks, ZeRO stage, offload or dtype.

A `StateSource` reads ranges of full parameters. Every rank requests the ranges that lie in its own flat buffers:
one range of each parameter group per rank at stages 1 and 2, one range of each parameter per rank at stage 3. Master
weights and optimizer states are fp32 on both sides, so they are restored bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plinth_base.errors import listed

from ..errors import CheckpointError
from ..upstream import FENCE

Shape = tuple[int, ...]
StatesOf = Callable[[Mapping[str, Any]], Sequence[str]]
"""Names of the optimizer's states of one of its groups."""
_SCALER_VALUES = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_LINKED = ("_hp_optimizer_states_linked",)
STATE = FENCE.patch(
    name="loading a state into another layout",
    reason="DeepSpeed loads only the files of the same number of ranks, stage, offload and dtype",
    otherwise="refused",
    replaces={
        _ENGINE: ("global_steps", "global_samples", "skipped_steps"),
        "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler": _SCALER_VALUES,
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": _LINKED,
        "deepspeed.runtime.bf16_optimizer:BF16_Optimizer": _LINKED,
    },
    reads={
        _ENGINE: ("param_names", "_get_zero_param_shapes()"),
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": (
            *("bit16_groups", "loss_scaler", "_lazy_init_hp_params_optimizer_state()", "update_lp_params()"),
        ),
        "deepspeed.runtime.bf16_optimizer:BF16_Optimizer": (
            *("bf16_groups", "_lazy_init_hp_params_optimizer_state()", "update_lp_params()"),
        ),
        "deepspeed.utils.mixed_precision_linkage": ("_hp_mapping",),
        "deepspeed.utils.tensor_fragment:tensor_fragment": ("lp_fragment_address", "hp_fragment_address"),
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": (
            *("fp16_groups", "fp32_partitioned_groups_flat", "sub_group_to_group_id", "persistent_parameters"),
            *("checkpoint_event_prologue()", "checkpoint_event_epilogue()", "_get_param_partition_rank(param)"),
            "_reassign_or_swap_out_partitioned_parameters(sub_group_id)",
        ),
        "deepspeed.runtime.zero.partition_parameters": ("ds_numel", "partition_numel()"),
    },
)


class StateLayout(Protocol):
    """Layout of the ranks that saved a state."""

    @property
    def stage(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def groups(self) -> Sequence[Mapping[str, Shape]]:
        """Parameter shapes by name, in order, for each group of parameters in one flat buffer."""


class StateSource(Protocol):
    """Saved training state by parameter name; implemented by `ckpt.ZeroCheckpoint`."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of every trained parameter, by name."""

    @property
    def states(self) -> Sequence[str]:
        """Names of the optimizer's states, such as Adam's moments; empty before its first step."""

    def states_of(self, name: str) -> Sequence[str]:
        """Names of the optimizer's states of the parameter `name`."""

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps in the states; 0 if there are none yet."""

    @property
    def client_state(self) -> Mapping[str, Any]: ...
    @property
    def counters(self) -> Mapping[str, int]:
        """DeepSpeed's global_steps, global_samples and skipped_steps, as far as they are saved."""

    @property
    def loss_scaler(self) -> Mapping[str, Any]:
        """Values of the fp16 loss scaler; empty without one."""

    @property
    def buffers(self) -> Mapping[str, Tensor]: ...
    @property
    def layout(self) -> StateLayout: ...
    @property
    def deepspeed_config(self) -> Mapping[str, Any]: ...
    def check(self) -> None:
        """Raise if any part of the state cannot be read."""

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a flattened parameter ("weight") or of its state `kind`: 1-d fp32, on the CPU."""


class Fragment(NamedTuple):
    """Elements [start, stop) of the flattened parameter `name`, located at `offset` in a flat buffer."""

    name: str
    shape: Shape
    start: int
    stop: int
    offset: int


def has_layout(engine: Any, source: StateSource, states_of: StatesOf) -> bool:
    """True if DeepSpeed's engine can load the source's files itself: same ranks, stage, groups, states and settings."""
    zero = engine.optimizer
    layout = source.layout
    here = [[(name, tuple(shape)) for name, shape in group.items()] for group in engine._get_zero_param_shapes()]
    return (
        layout.stage == engine.zero_optimization_stage()
        and layout.num_ranks == dist.get_world_size(group=zero.dp_process_group)
        and [list(group.items()) for group in layout.groups] == here
        and set(source.states) <= _states(engine, states_of)
        and _settings(source.deepspeed_config) == _settings(engine.config)
    )


@torch.no_grad()
def fill_state(engine: Any, module: nn.Module, source: StateSource, states_of: StatesOf) -> int:
    """Load the source into DeepSpeed's `engine`; returns its number of optimizer steps. Collective.

    Raises, on every rank and before any change:
        CheckpointError: on some rank the source cannot be read, or its parameters differ from the engine's.
        EngineConfigError: the installed DeepSpeed is not a tested one.
    """
    STATE.check()
    _agree(_problem(engine, source, states_of))
    zero = engine.optimizer
    is_sharded = engine.zero_optimization_stage() == 3
    if is_sharded:
        zero.checkpoint_event_prologue()  # gathered copies of small parameters would hide the new values
    for flat, group, fragments in flat_fragments(engine):
        _fill(flat, fragments, zero.optimizer, group, source, states_of(group))
    if is_sharded:
        for index in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(index)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].partition(zero.persistent_parameters)
        zero.checkpoint_event_epilogue()
    else:
        STATE.replace(zero, _hp_optimizer_states_linked=False)
        if source.states:
            zero._lazy_init_hp_params_optimizer_state()
        zero.update_lp_params()
    for name, buffer in module.named_buffers():
        if name in source.buffers:
            buffer.copy_(source.buffers[name])
    _set_counts(engine, source)
    # A checkpoint of another engine has no such count.
    return int(source.client_state.get("num_steps", source.counters.get("global_steps", source.optimizer_steps)))


def flat_fragments(engine: Any) -> Iterator[tuple[Tensor, dict[str, Any], list[Fragment]]]:
    """Yield (this rank's flat fp32 weights, their optimizer group, the fragments in them) of DeepSpeed's `engine`."""
    return _sharded(engine) if engine.zero_optimization_stage() == 3 else _partitioned(engine)


def _states(engine: Any, states_of: StatesOf) -> set[str]:
    """Names of all states of the engine's optimizer."""
    return {name for group in engine.optimizer.optimizer.param_groups for name in states_of(group)}


def _shapes(engine: Any) -> dict[str, Shape]:
    return {name: tuple(shape) for group in engine._get_zero_param_shapes() for name, shape in group.items()}


def _partitioned(engine: Any) -> Iterator[tuple[Tensor, dict[str, Any], list[Fragment]]]:
    """`flat_fragments` at stages 1 and 2."""
    zero, shapes = engine.optimizer, _shapes(engine)
    groups = zero.bit16_groups if hasattr(zero, "bit16_groups") else zero.bf16_groups
    for group, parameters in zip(zero.optimizer.param_groups, groups, strict=True):
        fragments = []
        for parameter in parameters:
            mapping = parameter._hp_mapping
            if mapping is not None:
                start, size = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
                offset = mapping.hp_fragment_address.start
                name = engine.param_names[parameter]
                fragments.append(Fragment(name, shapes[name], start, start + size, offset))
        yield group["params"][0], group, fragments


def _sharded(engine: Any) -> Iterator[tuple[Tensor, dict[str, Any], list[Fragment]]]:
    """`flat_fragments` at stage 3."""
    zero, shapes = engine.optimizer, _shapes(engine)
    for index, parameters in enumerate(zero.fp16_groups):
        group = zero.optimizer.param_groups[zero.sub_group_to_group_id[index]]
        fragments, offset = [], 0
        for parameter in parameters:
            size = parameter.partition_numel()
            start = min(zero._get_param_partition_rank(parameter) * size, parameter.ds_numel)
            stop = min(start + size, parameter.ds_numel)
            name = engine.param_names[parameter]
            fragments.append(Fragment(name, shapes[name], start, stop, offset))
            offset += size
        yield zero.fp32_partitioned_groups_flat[index], group, fragments


def _fill(
    flat: Tensor,
    fragments: Sequence[Fragment],
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    source: StateSource,
    states: Sequence[str],
) -> None:
    """Fill the weights and optimizer states of one flat buffer; padding is set to zero."""
    targets = {"weight": flat.data}
    state = optimizer.state[flat]
    if source.states:
        on_device = group.get("fused") or group.get("capturable")  # as torch's AdamW does
        device = flat.device if on_device else torch.device("cpu")
        if source.optimizer_steps:
            state["step"] = torch.tensor(float(source.optimizer_steps), dtype=torch.float32, device=device)
        for kind in states:
            targets[kind] = state.setdefault(kind, torch.empty_like(flat.data))
    else:
        state.clear()
    for kind, target in targets.items():
        target.zero_()
        for part in fragments:
            if part.start < part.stop:
                values = source.read(part.name, kind, part.start, part.stop)
                target[part.offset : part.offset + part.stop - part.start].copy_(values)


def _set_counts(engine: Any, source: StateSource) -> None:
    STATE.replace(engine, **source.counters)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if getattr(scaler, "dynamic", False) and "last_overflow_iter" in source.loss_scaler:
        STATE.replace(
            scaler, **{name: source.loss_scaler[name] for name in _SCALER_VALUES if name in source.loss_scaler}
        )


def _problem(engine: Any, source: StateSource, states_of: StatesOf) -> str | None:
    """Reason why this rank cannot load the source; None if it can."""
    if "nvme" in _devices(engine.config):
        return "this engine keeps its state on NVMe: use zero.offload.optimizer=cpu"
    try:
        source.check()
        states = _states(engine, states_of)
        if source.states and set(source.states) != states:
            return f"its optimizer has the states {sorted(source.states)}, this engine's {sorted(states)}"
        there = {name: tuple(shape) for name, shape in source.shapes.items()}
        for _, group, fragments in flat_fragments(engine) if source.states else ():
            for name in (part.name for part in fragments if part.name in there):
                if set(source.states_of(name)) != set(states_of(group)):
                    return f"{name} has the states {source.states_of(name)}, and {states_of(group)} here"
    except Exception as error:  # of any type: the other ranks must learn of it, or they would hang
        return f"{type(error).__name__}: {error}"
    here = _shapes(engine)
    differences = [
        *(f"{name} is missing in the checkpoint" for name in here if name not in there),
        *(f"{name} is not a trainable parameter of this engine" for name in there if name not in here),
        *(
            f"{name} has shape {there[name]} in the checkpoint and {shape} here"
            for name, shape in here.items()
            if there.get(name, shape) != shape
        ),
    ]
    return f"its parameters differ: {listed(differences, separator='; ')}" if differences else None


def _agree(problem: str | None) -> None:
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    refused = {rank: text for rank, text in enumerate(problems) if text is not None}
    if refused:
        rank, text = next(iter(refused.items()))
        raise CheckpointError(f"cannot load the state (rank {rank} of {len(problems)}): {text}. Nothing was changed.")


def _settings(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """The DeepSpeed settings that determine the optimizer class and its files."""
    enabled = tuple(bool((config.get(name) or {}).get("enabled")) for name in ("bf16", "fp16"))
    return (*_devices(config), *enabled, (config.get("data_types") or {}).get("grad_accum_dtype"))


def _devices(config: Mapping[str, Any]) -> tuple[str, str]:
    zero = config.get("zero_optimization") or {}
    optimizer, param = ((zero.get(name) or {}).get("device", "none") for name in ("offload_optimizer", "offload_param"))
    return str(optimizer), str(param)
