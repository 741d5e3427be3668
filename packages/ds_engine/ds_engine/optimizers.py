"""Optimizers by name (`optim.name`). Standard library only: settings and memory plans know them before torch is loaded.

To add an optimizer, write its class in a module of `zero/` (torch's own need none) and its entry here; the tests over
all names then cover it. A user's own class needs no entry: `own_optimizer` makes one by trying it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

MATRIX_ROUND = 2**25
"""Elements per rank of the matrices that an optimizer of matrices (`Optimizer.matrix_states`) gathers at a time."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The class of an optimizer, and what the engine and its plans need to know of it."""

    function: str
    """`module:class`, the module absolute (`torch.optim`) or in this package (`.zero.adamw`). The class steps flat fp32
    tensors, and takes parameter groups, `lr`, `weight_decay`, `settings` and `options`."""
    states: tuple[str, ...]
    """Names of its fp32 tensors of a parameter's size."""
    matrix_states: tuple[str, ...] = ()
    """Instead of `states`, those of the matrices that it steps whole. Its groups of them have `matrices=True`, and
    the engine calls its method `bind`."""
    settings: tuple[str, ...] = ()
    """Keys of `OptimConfig` that it takes."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `optim.options` that it takes, and their defaults."""
    needs_option: Mapping[str, str] = field(default_factory=dict)
    """State -> the option without which it does not exist."""
    divides_gradients: bool = False
    """Divides gradients by its 0-d attribute `grad_scale` while it reads them. Without it DeepSpeed unscales and clips
    them first, in passes of its own."""
    rate_factor: float = 0.0
    """Good learning rates divided by AdamW's, with which an app can choose one; 0: unknown."""
    state_bytes: float | None = None
    """Bytes of all states per element; None: 4 for each."""
    unportable: str = ""
    """Reason why its states load only with the same number of ranks and stage; empty if they load with any."""
    package: str = ""
    """Package to install, if this one does not require it."""

    def build(self, groups: Any, lr: float, settings: Any) -> Any:
        """The optimizer of parameter `groups` with the settings of an `OptimConfig`."""
        module, _, name = self.function.partition(":")
        options = {key: getattr(settings, key) for key in self.settings} | dict(self.options) | dict(settings.options)
        return getattr(import_module(module, __package__), name)(groups, lr=lr, **options)

    def states_of(self, options: Mapping[str, Any], *, matrices: bool = False) -> tuple[str, ...]:
        """Names of the states of a group of parameters, of `matrices` or not, with these `optim.options`."""
        names = self.matrix_states if matrices and self.matrix_states else self.states
        given = {**self.options, **options}
        return tuple(name for name in names if name not in self.needs_option or given[self.needs_option[name]])

    def bytes_per_element(self, options: Mapping[str, Any], *, matrices: bool = False) -> float:
        """Bytes of all states per element of such a group."""
        return 4.0 * len(self.states_of(options, matrices=matrices)) if self.state_bytes is None else self.state_bytes


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(
        function=".zero.adamw:AdamW",
        states=("exp_avg", "exp_avg_sq"),
        settings=("betas", "eps"),
        divides_gradients=True,
        rate_factor=1.0,
    ),
    "muon": Optimizer(
        function=".zero.muon:Muon",
        states=("exp_avg", "exp_avg_sq"),
        matrix_states=("momentum_buffer",),
        settings=("betas", "eps"),
        options={
            "momentum": 0.95,
            "nesterov": True,
            "ns_steps": 5,
            "adjust_lr_fn": "match_rms_adamw",
            "adam_lr": None,
        },
        divides_gradients=True,
        rate_factor=5.0,  # with match_rms_adamw, in short runs: docs/ds_engine.md
    ),
    "sgd": Optimizer(
        function="torch.optim:SGD",
        states=("momentum_buffer",),
        options={"momentum": 0.0, "dampening": 0.0, "nesterov": False},
        needs_option={"momentum_buffer": "momentum"},
    ),
    "adam8bit": Optimizer(
        function="bitsandbytes.optim:AdamW8bit",
        states=("state1", "state2"),
        settings=("betas", "eps"),
        rate_factor=1.0,
        state_bytes=2 + 2 * 4 / 256,  # two bytes, and two fp32 scales of each block of 256 elements
        unportable="its states are quantized in blocks of each rank's flat tensors",
        package="bitsandbytes",
    ),
}
"""Name -> optimizer."""
