"""A configuration without open settings, with the reason of each choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from plinth_base.errors import prefix_fields
from rl_data import DataConfigError
from rl_data.tasks.fetched import fetch, is_fetched

from ..config import RanksConfig
from ..errors import InputError
from ..launch.gpus import Gpu
from ..ranks.environment import why_cpu
from ..rules import value_of

if TYPE_CHECKING:
    from .memory import Plan

ConfigT = TypeVar("ConfigT")


ORIGINS: ContextVar[Mapping[str, str]] = ContextVar("ORIGINS", default=MappingProxyType({}))
"""Dotted key -> the file of DeepSpeed or accelerate, and its key there, that gave the value (`actor.deepspeed`)."""


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(Generic[ConfigT]):
    """A configuration without open settings, and why each was chosen."""

    config: ConfigT
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Dotted key -> why it has its value; given settings are not among them."""
    consequences: Mapping[str, str] = field(default_factory=dict)
    """Dotted key -> the setting from which its value follows."""
    origins: Mapping[str, str] = field(default_factory=ORIGINS.get)
    """Dotted key -> where in a file of another format its value was given."""
    devices: str = "the CPU"
    warning: str = ""
    """Reason why the devices are not those that the user named, in one line; empty if they are."""
    memory: str = ""
    """The memory plan in one line; empty without one."""
    rank_bytes: int = 0
    """Planned bytes of a rank at its peak."""
    plan: Plan | None = None
    """The memory plan of a rank and a server on one GPU; None without one."""

    @classmethod
    def on_devices(cls, config: ConfigT, gpus: Sequence[Gpu]) -> ResolvedConfig[ConfigT]:
        """A configuration that still has open settings, for these GPUs; none: the CPU."""
        if not gpus:
            return cls(config=config)
        least = min(gpu.free_bytes for gpu in gpus)
        return cls(config=config, devices=f"{len(gpus)} x {gpus[0].name} ({least / 2**30:.0f} GiB free)")

    def on_trainer_device(self, *, on_gpu: bool) -> ResolvedConfig[ConfigT]:
        """`trainer.device=auto` decided."""
        device, why = ("cuda", "there are GPUs") if on_gpu else ("cpu", "there is no GPU")
        return self.with_default("trainer.device", device, why, listed=False)

    def with_default(
        self, key: str, value: Any, why: str, *, listed: bool = True, remedy: str = ""
    ) -> ResolvedConfig[ConfigT]:
        """Sets a setting that is open: null or `auto`.

        Raises InputError if the configuration does not take the value; `remedy`: what the user can do then.

        Args:
            listed: False for a choice that tells the user nothing, as in `with_consequence`.
        """
        if value_of(self.config, key) not in (None, "auto"):
            return self
        if not listed:
            return self.with_consequence(key, value, why)
        return replace(self, config=self._with_value(key, value, why, remedy), reasons={**self.reasons, key: why})

    def with_consequence(self, key: str, value: Any, why: str) -> ResolvedConfig[ConfigT]:
        """Sets a setting that follows from others. `lines` does not list it, config.yaml and its comment have it."""
        if value_of(self.config, key) == value:
            return self
        consequences = {**self.consequences, key: why}
        return replace(self, config=self._with_value(key, value, why), consequences=consequences)

    def _with_value(self, key: str, value: Any, why: str, remedy: str = "") -> ConfigT:
        try:
            config: ConfigT = with_value(self.config, key, value)
        except ValueError as error:
            origin = f"{key}={_text(value)} was chosen: {why}"
            raise InputError.of(error, remedy="; ".join(filter(None, (origin, remedy)))) from error
        return config

    def lines(self) -> list[str]:
        """The choices in at most three lines for the user."""
        warning = [self.warning] if self.warning else []
        if not self.reasons:
            return warning
        chosen = ", ".join(f"{key}={_text(value_of(self.config, key))}" for key in self.reasons)
        return [*warning, f"chosen for {self.devices}: {chosen}", *([self.memory] if self.memory else [])]

    def comment(self) -> str:
        """The choices with their reasons, one setting a line."""
        chosen = {**self.reasons, **self.consequences}
        blocks = {
            "Given by files:": {key: why for key, why in self.origins.items() if key not in chosen},
            f"Chosen for {self.devices}; every other value was given or is a default.": chosen,
        }
        lines = []
        for head, reasons in blocks.items():
            own = [f"{key}={_text(value_of(self.config, key))}: {why}" for key, why in reasons.items()]
            lines += [head, *own] if own else []
        return "\n".join([*lines, *([self.memory] if self.memory else [])])


def device_warning(trainer: RanksConfig) -> str:
    """`why_cpu` on this host; the nodes of a cluster have variables of their own."""
    return why_cpu(trainer.device) if trainer.ray_address is None else ""


def with_value(config: Any, key: str, value: Any) -> Any:
    """The configuration with another value of a dotted key. Raises ValueError if it is not allowed."""
    name, _, rest = key.partition(".")
    if rest:
        with prefix_fields(name):
            value = with_value(getattr(config, name), rest, value)
    return replace(config, **{name: value})


def with_fetched_files(config: ConfigT) -> ConfigT:
    """The configuration with a path in place of every `fetched:NAME` and `reasoning_gym:TASK?OPTIONS`, for which the
    package index is asked if necessary; those of keys `val…` are held out.

    Raises rl_data.DataConfigError, with the dotted key, for an unknown name or option, or without the index.
    """
    changes: dict[str, Any] = {}
    for item in fields(config):  # type: ignore[arg-type]
        value: Any = getattr(config, item.name)
        try:
            if is_dataclass(value):
                made: Any = with_fetched_files(value)
            elif isinstance(value, tuple):
                held_out = item.name.startswith("val")
                made = tuple(str(fetch(entry, held_out=held_out)) if is_fetched(entry) else entry for entry in value)
            else:
                made = str(fetch(value)) if is_fetched(value) else value
        except DataConfigError as error:
            raise error.under(item.name) from error
        if made != value:
            changes[item.name] = made
    return replace(config, **changes) if changes else config  # type: ignore[type-var]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
