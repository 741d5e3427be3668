"""Stage 3 hooks: whole transformer layers are gathered and released, with few Python calls per layer.

DeepSpeed gathers weights in hooks of every submodule, sixteen times per layer. Each takes microseconds of Python that
the device waits for, and breaks torch.compile graphs. Here each transformer layer is one of DeepSpeed's leaf modules:
its weights are gathered together, and its gradients are reduced together at the end of its backward pass. If all
parameters of a layer are already gathered, fetch and release take a fast path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..model.parts import transformer_layers
from ..upstream import FENCE
from .zero3_gather import param_status, parameter_offload

_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator"
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload"
_PRIVATE = "_PartitionedParameterCoordinator__"
LEAVES = FENCE.patch(
    name="layers of stage 3 as leaf modules",
    reason="DeepSpeed gathers a layer's weights together, and finds them in a cache",
    otherwise="stock path",
    replaces={_COORDINATOR: ("iter_params(module, recurse)",), _OFFLOAD: ("iter_params",)},
    reads={
        "deepspeed.utils.z3_leaf_module": ("set_z3_leaf_module(model, flag)",),
        _COORDINATOR: ("ds_external_parameters",),
    },
)
HOOKS = FENCE.patch(
    name="hooks of stage 3's layers",
    reason="one autograd function at each end of a layer, only where there are gradients",
    otherwise="stock path",
    replaces={f"{_OFFLOAD}:DeepSpeedZeRoOffload": ("pre_bwd_fn", "post_bwd_fn")},
    reads={
        f"{_OFFLOAD}:DeepSpeedZeRoOffload": (
            "ds_grads_remaining",
            "pre_sub_module_backward_function(sub_module)",
            "post_sub_module_backward_function(sub_module)",
        ),
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": ("_leaf_module_hooks", "parameter_offload"),
        "torch.nn:Module": ("_backward_hooks",),
    },
)
FETCH = FENCE.patch(
    name="fetch and release of gathered layers",
    reason="no bookkeeping for a module whose parameters are gathered, once nothing is left to prefetch",
    otherwise="stock path",
    replaces={
        f"{_COORDINATOR}:PartitionedParameterCoordinator": (
            "fetch_sub_module(current_submodule, forward)",
            "release_sub_module(submodule, forward)",
        )
    },
    reads={
        f"{_COORDINATOR}:PartitionedParameterCoordinator": (
            *("is_complete_trace()", f"{_PRIVATE}params_to_release(submodule_to_release, step_id)"),
            *(f"{_PRIVATE}{name}" for name in ("param_queue", "step_id", "n_available_params")),
            f"{_PRIVATE}active_backward_submodules",
        ),
        _COORDINATOR: ("iter_params(module, recurse)", "ds_recompute_parameters"),
        f"{_OFFLOAD}:DeepSpeedZeRoOffload": ("get_param_coordinator()",),
        "deepspeed.runtime.zero.partition_parameters": (
            *("ds_id", "ds_status", "ds_numel", "ds_active_sub_modules", "is_external_param"),
            "partition(param_list, hierarchy, has_been_updated, free_data)",
        ),
        "deepspeed.utils.z3_leaf_module": ("z3_leaf_module(model)",),
        "torch._C": ("_current_graph_task_id",),
    },
)
_CACHED_PARAMETERS = "_ds_engine_parameters"
"""Attribute of a leaf module, and of the model, with all of its parameters."""


def set_leaf_modules(model: Any) -> None:
    """Make the transformer layers of `model` leaf modules of DeepSpeed; a model without layers is unchanged.

    Call it before DeepSpeed takes over the model and after adapters are added.
    """
    from deepspeed.utils.z3_leaf_module import set_z3_leaf_module

    for layer in transformer_layers(model):
        set_z3_leaf_module(layer, True)
        layer.register_forward_pre_hook(_require_input_gradient)
        setattr(layer, _CACHED_PARAMETERS, tuple(layer.parameters()))
    setattr(model, _CACHED_PARAMETERS, tuple(model.parameters()))
    _cache_iter_params()


def fuse_leaf_hooks(model: Any, zero_optimizer: Any) -> None:
    """Replace DeepSpeed's hooks of each leaf module by one autograd function at its input and one at its output.

    DeepSpeed installs two at each end, which bind their arguments by signature and also run without gradients. Layers
    with backward hooks that are not DeepSpeed's keep all of their hooks.

    Args:
        zero_optimizer: DeepSpeed's stage 3 optimizer, or the DeepSpeedZeRoOffload of a frozen model, started after
            `set_leaf_modules`.
    """
    if not HOOKS.check():
        return
    offload = parameter_offload(zero_optimizer)
    deepspeed_hooks = {handle.id for handle in getattr(zero_optimizer, "_leaf_module_hooks", ())}
    for layer in transformer_layers(model):
        if not deepspeed_hooks.issuperset(layer._backward_hooks):
            continue  # the order of all hooks is kept
        hooks = list(layer._backward_hooks.values())
        layer._backward_hooks.clear()
        before = HOOKS.counted("pre_bwd_fn", partial(_BeforeBackward.apply, layer, offload))
        after = HOOKS.counted("post_bwd_fn", partial(_AfterBackward.apply, layer, offload, hooks))
        HOOKS.replace(layer, pre_bwd_fn=_IfGradEnabled(before), post_bwd_fn=_IfGradEnabled(after))


@dataclass(frozen=True)
class _IfGradEnabled:
    """Stands in for the autograd function that DeepSpeed's hooks apply; does nothing without gradients."""

    function: Callable[[Tensor], Tensor]

    def apply(self, tensor: Tensor) -> Tensor:
        return self.function(tensor) if torch.is_grad_enabled() else tensor


class _BeforeBackward(torch.autograd.Function):
    """Applied to a layer's output: gathers the weights at the start of the layer's backward pass."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, offload: Any, output: Tensor) -> Tensor:
        ctx.layer, ctx.offload = layer, offload
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.offload.pre_sub_module_backward_function(ctx.layer)
        return None, None, *gradients


class _AfterBackward(torch.autograd.Function):
    """Applied to a layer's inputs: reduces gradients (`hooks`) and releases weights when all inputs have gradients.

    DeepSpeed sets `ds_grads_remaining` to zero before each forward pass.
    """

    @staticmethod
    def forward(ctx: Any, layer: Any, offload: Any, hooks: Sequence[Callable[..., None]], given: Tensor) -> Tensor:
        ctx.layer, ctx.offload, ctx.hooks = layer, offload, hooks
        if given.requires_grad:
            layer.ds_grads_remaining += 1
        return given.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        layer = ctx.layer
        layer.ds_grads_remaining -= 1
        if layer.ds_grads_remaining == 0:
            for hook in ctx.hooks:
                hook(layer, None, None)
            ctx.offload.post_sub_module_backward_function(layer)
        return None, None, None, *gradients


def _require_input_gradient(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Make a layer's input require a gradient, which marks the end of the layer's backward pass.

    The output of frozen embeddings requires none: DeepSpeed would reduce the layer's gradients before they exist.
    """
    if not torch.is_grad_enabled():
        return None
    if not args or not isinstance(args[0], Tensor):
        raise ModelError(
            f"stage 3 needs {type(layer).__name__} to receive its hidden states as first positional argument"
        )
    hidden = args[0]
    if hidden.requires_grad or not any(p.requires_grad for p in layer.parameters()):
        return None
    return (hidden.detach().requires_grad_(), *args[1:])


def _cache_iter_params() -> None:
    """Make DeepSpeed's `iter_params` return cached parameters.

    DeepSpeed traverses the submodules of a leaf module several times per forward and backward pass, and those of the
    whole model in every step.
    """
    from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator

    original = partitioned_param_coordinator.iter_params
    if original.__module__ != partitioned_param_coordinator.__name__:
        return  # it is replaced already

    def iter_params(module: Any, recurse: bool = False) -> Iterable[nn.Parameter]:
        own = getattr(module, _CACHED_PARAMETERS, None) if recurse else None
        if own is None:
            return cast("Iterable[nn.Parameter]", original(module, recurse=recurse))
        return chain(own, (parameter for _, parameter in module.ds_external_parameters()))

    for user in (parameter_offload, partitioned_param_coordinator):
        LEAVES.replace(user, iter_params=iter_params)


def add_fetch_fast_path(zero_optimizer: Any) -> None:
    """Skip the bookkeeping of DeepSpeed's coordinator when a module's parameters are already gathered.

    Before and after every module, forward and backward, the coordinator iterates several times over its parameters with
    sets and dictionaries: which are in flight, which come next, which to release. Once everything the pass needs is
    requested (in a model within `stage3_max_live_parameters`, after the first layers), recording the users of each
    parameter is enough. Gathers and releases remain DeepSpeed's.

    Args:
        zero_optimizer: DeepSpeed's stage 3 optimizer, or the DeepSpeedZeRoOffload of a frozen model; no parameters on
            NVMe.
    """
    if FETCH.check():
        coordinator = parameter_offload(zero_optimizer).get_param_coordinator()
        fast_path = _FastPath(coordinator)
        FETCH.replace(coordinator, fetch_sub_module=fast_path.fetch, release_sub_module=fast_path.release)


class _FastPath:
    """Replaces fetch and release of a PartitionedParameterCoordinator."""

    def __init__(self, coordinator: Any) -> None:
        from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
        from deepspeed.utils.z3_leaf_module import z3_leaf_module

        self._iter_params, self._is_leaf = iter_params, z3_leaf_module
        self._available = param_status("AVAILABLE")
        self._coordinator = coordinator
        self._state: dict[str, Any] = vars(coordinator)
        self._fetch = coordinator.fetch_sub_module
        self._release = coordinator.release_sub_module
        self._params_to_release = getattr(coordinator, f"{_PRIVATE}params_to_release")

    def fetch(self, module: Any, forward: bool) -> None:
        """Register `module` as user of its parameters if all are gathered and nothing is left to prefetch.

        No stream wait is needed: DeepSpeed waited for the gather stream in the fetch that gathered them.
        """
        state, params = self._state, self._parameters(module)
        recomputes = forward and torch._C._current_graph_task_id() != -1
        if (
            recomputes
            or not self._coordinator.is_complete_trace()
            or state[f"{_PRIVATE}param_queue"]
            or not all(param.ds_status is self._available for param in params)
        ):
            self._fetch(module, forward)
            return
        for param in params:
            param.ds_active_sub_modules.add(module.ds_id)
        if not forward:
            state[f"{_PRIVATE}active_backward_submodules"][module.ds_id] = module
        state[f"{_PRIVATE}step_id"] += 1

    def release(self, module: Any, forward: bool = False) -> None:
        """Release the parameters of `module` that DeepSpeed releases at this step of a complete trace."""
        state, coordinator = self._state, self._coordinator
        if not coordinator.is_complete_trace() or (module.ds_recompute_parameters and not forward):
            self._release(module, forward)
            return
        to_release = self._params_to_release(module, state[f"{_PRIVATE}step_id"])
        if not forward:
            state[f"{_PRIVATE}active_backward_submodules"].pop(module.ds_id, None)
        for param in self._parameters(module):
            users = param.ds_active_sub_modules
            users.discard(module.ds_id)
            unused = param.ds_id in to_release and not users and not param.is_external_param
            if unused and param.ds_status is self._available:
                param.partition()
                state[f"{_PRIVATE}n_available_params"] -= param.ds_numel

    def _parameters(self, module: nn.Module) -> list[Any]:
        """The parameters that DeepSpeed fetches for `module`."""
        return list(self._iter_params(module, recurse=self._is_leaf(module)))
