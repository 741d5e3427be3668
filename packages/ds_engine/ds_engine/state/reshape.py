"""Continue from a state that other ranks wrote: another number of them, ZeRO stage, offload or dtype.

A source hands out ranges of whole parameters; every rank asks for those that lie in its own flat buffers, be they cut
as stages 1 and 2 cut them (one range of a group a rank) or as stage 3 does (one range of each parameter a rank). What
trains on is fp32 throughout, so nothing is rounded: masters and Adam's moments are the saved ones, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import CheckpointError

__all__ = ["StateLayout", "StateSource", "fill_state", "has_layout"]

StateKind = Literal["weight", "exp_avg", "exp_avg_sq"]
Shape = tuple[int, ...]
_MOMENTS: tuple[StateKind, ...] = ("exp_avg", "exp_avg_sq")
_SCALER_VALUES = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_NUM_SHOWN = 3


class StateLayout(Protocol):
    """What the ranks that wrote a state were."""

    @property
    def stage(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def groups(self) -> Sequence[Mapping[str, Shape]]:
        """Shapes by name, for each group of parameters that lie in one flat buffer, in order."""


class StateSource(Protocol):
    """What a run has trained, by parameter name; `ckpt.ZeroCheckpoint` is one."""

    @property
    def shapes(self) -> Mapping[str, Shape]: ...
    @property
    def adam_steps(self) -> int:
        """Steps behind the moments; 0 when there are none yet."""

    @property
    def client_state(self) -> Mapping[str, Any]: ...
    @property
    def counters(self) -> Mapping[str, int]:
        """DeepSpeed's global_steps, global_samples and skipped_steps, as far as known."""

    @property
    def loss_scaler(self) -> Mapping[str, Any]: ...
    @property
    def buffers(self) -> Mapping[str, Tensor]: ...
    @property
    def layout(self) -> StateLayout: ...
    @property
    def deepspeed_config(self) -> Mapping[str, Any]: ...
    def check(self) -> None:
        """Raise whatever stands against reading all of it."""

    def read(self, name: str, kind: StateKind, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a flattened parameter or of a moment of it, 1-d fp32 on the CPU, not written to."""


@dataclass(frozen=True, kw_only=True)
class _Fragment:
    """Elements [start, stop) of parameter `name`, which lie at `offset` of a flat buffer."""

    name: str
    start: int
    stop: int
    offset: int


def has_layout(engine: Any, source: StateSource) -> bool:
    """Whether DeepSpeed's engine would write the files that the source was read from, shard by shard alike."""
    zero = engine.optimizer
    layout = source.layout
    here = [[(name, tuple(shape)) for name, shape in group.items()] for group in engine._get_zero_param_shapes()]
    return (
        layout.stage == engine.zero_optimization_stage()
        and layout.num_ranks == dist.get_world_size(group=zero.dp_process_group)
        and [list(group.items()) for group in layout.groups] == here
        and _settings(source.deepspeed_config) == _settings(engine.config)
    )


@torch.no_grad()
def fill_state(engine: Any, module: nn.Module, source: StateSource) -> int:
    """Make the source's state that of DeepSpeed's `engine`; returns the client's number of steps. Collective.

    Raises, on every rank and before anything is changed:
        CheckpointError: on some rank the source cannot be read, or is of other parameters.
    """
    _agree(_problem(engine, source))
    zero = engine.optimizer
    is_sharded = engine.zero_optimization_stage() == 3
    if is_sharded:
        zero.checkpoint_event_prologue()  # whole copies of small parameters would hide the new values
    for flat, group, fragments in _sharded(engine) if is_sharded else _partitioned(engine):
        _fill(flat, fragments, zero.optimizer, group, source)
    if is_sharded:
        for index in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(index)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].partition(zero.persistent_parameters)
        zero.checkpoint_event_epilogue()
    else:
        zero._hp_optimizer_states_linked = False
        if source.adam_steps:
            zero._lazy_init_hp_params_optimizer_state()
        zero.update_lp_params()
    for name, buffer in module.named_buffers():
        if name in source.buffers:
            buffer.copy_(source.buffers[name])
    _set_counts(engine, source)
    return int(source.client_state["num_steps"])


def _partitioned(engine: Any) -> Iterator[tuple[Tensor, dict[str, Any], list[_Fragment]]]:
    """Stages 1 and 2: (this rank's flat fp32 weights, their optimizer group, what lies where in them)."""
    zero = engine.optimizer
    groups = zero.bit16_groups if hasattr(zero, "bit16_groups") else zero.bf16_groups
    for group, parameters in zip(zero.optimizer.param_groups, groups, strict=True):
        fragments = []
        for parameter in parameters:
            mapping = parameter._hp_mapping
            if mapping is not None:
                start, size = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
                fragments.append(
                    _Fragment(
                        name=engine.param_names[parameter],
                        start=start,
                        stop=start + size,
                        offset=mapping.hp_fragment_address.start,
                    )
                )
        yield group["params"][0], group, fragments


def _sharded(engine: Any) -> Iterator[tuple[Tensor, dict[str, Any], list[_Fragment]]]:
    """Stage 3: the same."""
    zero = engine.optimizer
    for index, parameters in enumerate(zero.fp16_groups):
        group = zero.optimizer.param_groups[zero.sub_group_to_group_id[index]]
        fragments, offset = [], 0
        for parameter in parameters:
            size = parameter.partition_numel()
            start = min(zero._get_param_partition_rank(parameter) * size, parameter.ds_numel)
            stop = min(start + size, parameter.ds_numel)
            fragments.append(_Fragment(name=engine.param_names[parameter], start=start, stop=stop, offset=offset))
            offset += size
        yield zero.fp32_partitioned_groups_flat[index], group, fragments


def _fill(
    flat: Tensor,
    fragments: Sequence[_Fragment],
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    source: StateSource,
) -> None:
    """Weights and Adam's state of one flat buffer; padding becomes zero."""
    targets: dict[StateKind, Tensor] = {"weight": flat.data}
    state = optimizer.state[flat]
    if source.adam_steps:
        on_device = group.get("fused") or group.get("capturable")  # where torch's AdamW would have put it
        device = flat.device if on_device else torch.device("cpu")
        state["step"] = torch.tensor(float(source.adam_steps), dtype=torch.float32, device=device)
        for kind in _MOMENTS:
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
    for name, value in source.counters.items():
        setattr(engine, name, value)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if getattr(scaler, "dynamic", False) and "last_overflow_iter" in source.loss_scaler:
        for name in _SCALER_VALUES:
            if name in source.loss_scaler:
                setattr(scaler, name, source.loss_scaler[name])


def _problem(engine: Any, source: StateSource) -> str | None:
    """What stands against filling this rank's state from the source."""
    if "nvme" in _devices(engine.config):
        return "this engine keeps its state on NVMe; continue where it was saved, or offload to cpu"
    try:
        source.check()
        if "num_steps" not in source.client_state:
            return "it does not say how many steps were taken (num_steps in its client state)"
        there = {name: tuple(shape) for name, shape in source.shapes.items()}
    except Exception as error:  # of whatever kind: the other ranks have to hear of it, or they would wait
        return f"{type(error).__name__}: {error}"
    here = {name: tuple(shape) for group in engine._get_zero_param_shapes() for name, shape in group.items()}
    differences = [
        *(f"{name} is trained here only" for name in here if name not in there),
        *(f"{name} is in the checkpoint only" for name in there if name not in here),
        *(
            f"{name} is {there[name]} there and {shape} here"
            for name, shape in here.items()
            if there.get(name, shape) != shape
        ),
    ]
    if not differences:
        return None
    more = f" and {len(differences) - _NUM_SHOWN} more" if len(differences) > _NUM_SHOWN else ""
    return f"it is of other parameters: {'; '.join(differences[:_NUM_SHOWN])}{more}"


def _agree(problem: str | None) -> None:
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    found = {rank: text for rank, text in enumerate(problems) if text is not None}
    if found:
        rank, text = next(iter(found.items()))
        raise CheckpointError(
            f"the state cannot be continued from (rank {rank} of {len(problems)}): {text}. Nothing was changed."
        )


def _settings(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """What of DeepSpeed's configuration decides which optimizer class writes which files."""
    enabled = tuple(bool((config.get(name) or {}).get("enabled")) for name in ("bf16", "fp16"))
    return (*_devices(config), *enabled, (config.get("data_types") or {}).get("grad_accum_dtype"))


def _devices(config: Mapping[str, Any]) -> tuple[str, str]:
    zero = config.get("zero_optimization") or {}
    optimizer, param = ((zero.get(name) or {}).get("device", "none") for name in ("offload_optimizer", "offload_param"))
    return str(optimizer), str(param)
