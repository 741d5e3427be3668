"""Stage 3's visits to modules whose weights are there: nothing is to be sent for, so nothing is to be looked for.

Before and after every module, forward and backward, DeepSpeed goes through its parameters several times, with sets and
tables keyed by them: what is under way, what comes next, what may go. Once everything the pass will need has been sent
for (of a model within `stage3_max_live_parameters`, after the first layers), it is enough to note who uses a weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .zero3_gather import param_status, parameter_offload

__all__ = ["shorten_visits"]

_PRIVATE = "_PartitionedParameterCoordinator__"


def shorten_visits(zero_optimizer: Any) -> None:
    """Have DeepSpeed's coordinator take the short way where there is one. Gathers and releases stay its own.

    Args:
        zero_optimizer: DeepSpeed's of stage 3, or what stands in its place for a frozen model; no weights on NVMe.
    """
    _Visits(parameter_offload(zero_optimizer).get_param_coordinator()).install()


class _Visits:
    def __init__(self, coordinator: Any) -> None:
        from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
        from deepspeed.utils.z3_leaf_module import z3_leaf_module

        self._iter_params, self._is_leaf = iter_params, z3_leaf_module
        self._there = param_status("AVAILABLE")
        self._coordinator = coordinator
        self._state: dict[str, Any] = vars(coordinator)
        self._fetch = coordinator.fetch_sub_module
        self._release = coordinator.release_sub_module
        self._params_to_release = getattr(coordinator, f"{_PRIVATE}params_to_release")

    def install(self) -> None:
        self._coordinator.fetch_sub_module = self.fetch
        self._coordinator.release_sub_module = self.release

    def fetch(self, module: Any, forward: bool) -> None:
        """All there and nothing left to send for: DeepSpeed would add the module to the users of each, and count. Its
        wait for the stream of the gathers was in the visit that put these together."""
        state, params = self._state, self._parameters(module)
        recomputes = forward and torch._C._current_graph_task_id() != -1
        if (
            recomputes
            or not self._coordinator.is_complete_trace()
            or state[f"{_PRIVATE}param_queue"]
            or not all(param.ds_status is self._there for param in params)
        ):
            self._fetch(module, forward)
            return
        for param in params:
            param.ds_active_sub_modules.add(module.ds_id)
        if not forward:
            state[f"{_PRIVATE}active_backward_submodules"][module.ds_id] = module
        state[f"{_PRIVATE}step_id"] += 1

    def release(self, module: Any, forward: bool = False) -> None:
        """DeepSpeed's answer to which may go holds for every step; the rest is the same without its sets."""
        state, coordinator = self._state, self._coordinator
        if not coordinator.is_complete_trace() or (module.ds_recompute_parameters and not forward):
            self._release(module, forward)
            return
        going = self._params_to_release(module, state[f"{_PRIVATE}step_id"])
        if not forward:
            state[f"{_PRIVATE}active_backward_submodules"].pop(module.ds_id, None)
        for param in self._parameters(module):
            users = param.ds_active_sub_modules
            users.discard(module.ds_id)
            unused = param.ds_id in going and not users and not param.is_external_param
            if unused and param.ds_status is self._there:
                param.partition()
                state[f"{_PRIVATE}n_available_params"] -= param.ds_numel

    def _parameters(self, module: nn.Module) -> list[Any]:
        """What DeepSpeed fetches for a visit to `module`."""
        return list(self._iter_params(module, recurse=self._is_leaf(module)))
