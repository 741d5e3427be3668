"""A state handed from one engine to another of a different layout, in memory; on CPU and GPU ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor

from ds_engine import ZeroEngine

KINDS = ("weight", "exp_avg", "exp_avg_sq")
OTHER_KINDS = {"adam8bit": ("weight",)}
MATRIX_KINDS = {"muon": ("weight", "momentum_buffer")}
"""By optimizer, of all parameters and of matrices."""


@dataclass
class MemorySource:
    """Content of a checkpoint with `state`: [name][kind] -> whole fp32 tensor on the CPU."""

    state: Mapping[str, Mapping[str, Tensor]]
    optimizer_steps: int
    client_state: Mapping[str, Any]
    counters: Mapping[str, int] = field(default_factory=dict)
    loss_scaler: Mapping[str, Any] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    layout: Any = None
    deepspeed_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def states(self) -> set[str]:
        return {kind for kinds in self.state.values() for kind in kinds} - {"weight"}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(kinds["weight"].shape) for name, kinds in self.state.items()}

    def states_of(self, name: str) -> set[str]:
        return self.state[name].keys() - {"weight"}

    def check(self) -> None: ...

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        return self.state[name][kind].reshape(-1)[start:stop]


def state_of(engine: ZeroEngine) -> dict[str, dict[str, Tensor]]:
    """fp32 weights and states as DeepSpeed itself gathers them."""
    deepspeed = engine._deepspeed
    if hasattr(deepspeed.optimizer, "_hp_optimizer_states_linked"):
        # Stages 1 and 2 look for states when the first of several groups has made its first step: too early.
        deepspeed.optimizer._hp_optimizer_states_linked = False
        deepspeed.optimizer._lazy_init_hp_params_optimizer_state()
    state = {}
    for parameter, name in deepspeed.param_names.items():
        is_matrix = len(getattr(parameter, "ds_shape", parameter.shape)) > 1 and "embed" not in name
        optimizer = engine.config.optim.name
        kinds = (is_matrix and MATRIX_KINDS.get(optimizer)) or OTHER_KINDS.get(optimizer, KINDS)
        states = [safe_get_full_optimizer_state(parameter, kind) for kind in kinds[1:]]
        tensors = [safe_get_full_fp32_param(parameter), *states]
        state[name] = {kind: tensor.cpu().clone() for kind, tensor in zip(kinds, tensors, strict=True)}
    return state


def hand_over(
    first: Callable[[], ZeroEngine], second: Callable[[], ZeroEngine], train: Callable[[ZeroEngine, range], Any]
) -> dict[str, Any]:
    """The first engine takes two steps; both engines take a third one from the same state."""
    engine = first()
    train(engine, range(2))
    before = state_of(engine)
    expected = train(engine, range(2, 3))
    engine.close()
    engine = second()
    engine.load_state(MemorySource(state=before, optimizer_steps=2, client_state={"num_steps": 2}))
    after = state_of(engine)
    differing = [n for n, kinds in before.items() for kind in kinds if not torch.equal(kinds[kind], after[n][kind])]
    losses = train(engine, range(2, 3))
    num_steps = engine._num_steps
    engine.close()
    return {"differing": differing, "expected": expected, "losses": losses, "num_steps": num_steps}
