"""Optimizers by name (`optim.name`). Standard library only: settings and memory plans know them before torch is loaded.

To add an optimizer, write its class in a module of `zero/` (torch's own need none) and its entry here; the tests over
all names then cover it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The class of an optimizer, and what the engine and its plans need to know of it."""

    function: str
    """`module:class`, the module absolute (`torch.optim`) or in this package (`.zero.adamw`). The class steps flat fp32
    tensors, and takes parameter groups, `lr`, `weight_decay` and `settings`."""
    states: tuple[str, ...]
    """Names of its fp32 tensors of a parameter's size."""
    settings: tuple[str, ...] = ()
    """Keys of `OptimConfig` that it takes."""
    divides_gradients: bool = False
    """Divides gradients by its 0-d attribute `grad_scale` while it reads them. Without it DeepSpeed unscales and clips
    them first, in passes of its own."""

    def build(self, groups: Any, lr: float, settings: Any) -> Any:
        """The optimizer of parameter `groups` with the settings of an `OptimConfig`."""
        module, _, name = self.function.partition(":")
        options = {key: getattr(settings, key) for key in self.settings}
        return getattr(import_module(module, __package__), name)(groups, lr=lr, **options)


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(
        function=".zero.adamw:AdamW",
        states=("exp_avg", "exp_avg_sq"),
        settings=("betas", "eps"),
        divides_gradients=True,
    ),
}
"""Name -> optimizer."""
