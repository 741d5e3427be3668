"""Tries an optimizer on sixteen numbers on the CPU before any process starts: a user's own class, or given options.

ZeRO hands an optimizer flat fp32 tensors that hold pieces of many parameters. A class whose elements influence one
another, such as one that divides by a parameter's norm, would train on something else on every number of ranks.

`optim` is an OptimConfig, whose module stands above this one.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .errors import EngineConfigError
from .optimizers import Optimizer

_SIZE = 16
_NUM_STEPS = 3


def own_optimizer(optim: Any) -> Optimizer:
    """The entry of the class `optim.name` (`package.module:Class`), whose states are those that it makes.

    Raises:
        EngineConfigError: as `try_optimizer`.
    """
    settings = _settings(optim)
    optimizer = try_optimizer(Optimizer(function=optim.name, states=(), settings=settings), optim)
    (group,) = optimizer.param_groups
    (param,) = group["params"]
    state = optimizer.state.get(param, {})
    states = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.numel() == _SIZE}
    kept = {name for name in state if name not in states and name != "step"}
    kept |= {name for name, value in states.items() if value.dtype != torch.float32}
    kept |= {name for name, value in optimizer.start.items() if group.get(name) != value}
    unportable = f"it keeps {', '.join(sorted(kept))} besides fp32 states and a number of steps" if kept else ""
    return Optimizer(function=optim.name, states=tuple(states), settings=settings, unportable=unportable)


def _settings(optim: Any) -> tuple[str, ...]:
    """Keys of AdamW that are given and that the class takes too; the class has its own defaults."""
    module, _, name = optim.name.partition(":")
    try:
        parameters = inspect.signature(getattr(import_module(module), name)).parameters
    except Exception:  # trying it says why
        return ()
    return tuple(
        key for key in ("betas", "eps") if key in parameters and getattr(optim, key) != getattr(type(optim), key)
    )


def try_optimizer(entry: Optimizer, optim: Any) -> Any:
    """The optimizer of one flat parameter after a few steps; its attribute `start` has its group's plain settings
    before the first.

    Raises:
        EngineConfigError: it cannot be imported, built with these settings, or step fp32 tensors on the CPU; it ignores
            weight decay; its elements influence one another.
    """
    where: dict[str, Any] = {"field": "options" if optim.options else "name"}
    where["value"] = dict(optim.options) if optim.options else optim.name
    try:
        (whole, optimizer), (parts, _) = (_stepped(entry, optim, sizes) for sizes in ([_SIZE], [_SIZE // 2] * 2))
    except ImportError as error:
        remedy = f"pip install {entry.package}" if entry.package else "run in its folder, or add that to PYTHONPATH"
        raise EngineConfigError(
            f"it cannot be imported ({error})", field="name", value=optim.name, remedy=remedy
        ) from error
    except Exception as error:  # of any type: it is the user's code
        problem = f"{entry.function} cannot step an fp32 tensor with these settings ({type(error).__name__}: {error})"
        raise EngineConfigError(problem, **where) from error
    if optim.weight_decay and "weight_decay" not in optimizer.defaults:
        raise EngineConfigError(f"{optim.name} has none", field="weight_decay", value=optim.weight_decay, allowed="0")
    if not torch.allclose(whole, parts, rtol=1e-5, atol=1e-7):
        problem = "it steps a tensor in two halves to other values than whole; ZeRO cuts tensors anywhere"
        raise EngineConfigError(problem, field="name", value=optim.name, allowed="an optimizer of single elements")
    return optimizer


def _stepped(entry: Optimizer, optim: Any, sizes: Sequence[int]) -> tuple[Tensor, Any]:
    params = [torch.nn.Parameter(part.clone()) for part in torch.linspace(-1, 1, _SIZE).split(list(sizes))]
    optimizer = entry.build([{"params": params, "weight_decay": optim.weight_decay}], 1e-2, optim)
    (group,) = optimizer.param_groups
    optimizer.start = {name: value for name, value in group.items() if isinstance(value, int | float)}
    for step in range(1, _NUM_STEPS + 1):
        gradient = torch.linspace(-2, 3, _SIZE).sin() * step
        for param, part in zip(params, gradient.split(list(sizes)), strict=True):
            param.grad = part.clone()
        optimizer.step()
    return torch.cat([param.detach() for param in params]), optimizer
