"""A configuration without open settings, with the reason of each choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from ..config import RanksConfig, value_of
from ..errors import InputError
from ..launch.gpus import Gpu
from ..ranks.environment import why_cpu

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(Generic[ConfigT]):
    """A configuration without open settings, and why each was chosen."""

    config: ConfigT
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Dotted key -> why it has its value; given settings are not among them."""
    devices: str = "the CPU"
    warning: str = ""
    """Why the devices are other ones than the user named, in one line; empty if they are not."""
    memory: str = ""
    """The memory plan in one line; empty without one."""
    rank_bytes: int = 0
    """Planned bytes of a rank at its peak."""
    server_bytes: int = 0
    """Planned bytes of the server on the rank's GPU, awake."""
    gpu_bytes: int = 0
    """Planned bytes of both, in the turn with the most if they take turns."""
    host_bytes: int = 0
    """Planned bytes of host memory that turns need."""
    moved_bytes: int = 0
    """Bytes that one GPU and the host exchange in a step for turns, in both directions."""

    @classmethod
    def on_devices(cls, config: ConfigT, gpus: Sequence[Gpu]) -> ResolvedConfig[ConfigT]:
        """A configuration that still has open settings, for these GPUs; none: the CPU."""
        if not gpus:
            return cls(config=config)
        least = min(gpu.free_bytes for gpu in gpus)
        return cls(config=config, devices=f"{len(gpus)} x {gpus[0].name} ({least / 2**30:.0f} GiB free)")

    def with_default(self, key: str, value: Any, why: str) -> ResolvedConfig[ConfigT]:
        """Sets a setting that is open: null or `auto`.

        Raises InputError if the configuration does not take the value.
        """
        if value_of(self.config, key) not in (None, "auto"):
            return self
        try:
            config = with_value(self.config, key, value)
        except ValueError as error:
            raise InputError(f"{error}. {key}={_text(value)} was chosen: {why}") from error
        return replace(self, config=config, reasons={**self.reasons, key: why})

    def lines(self) -> list[str]:
        """What was chosen, for the user: at most three lines."""
        warning = [self.warning] if self.warning else []
        if not self.reasons:
            return warning
        chosen = ", ".join(f"{key}={_text(value_of(self.config, key))}" for key in self.reasons)
        return [*warning, f"chosen for {self.devices}: {chosen}", *([self.memory] if self.memory else [])]

    def comment(self) -> str:
        """What was chosen and why, one setting a line."""
        lines = [f"{key}={_text(value_of(self.config, key))}: {why}" for key, why in self.reasons.items()]
        head = [f"Chosen for {self.devices}; every other value was given or is a default."] if lines else []
        return "\n".join([*head, *lines, *([self.memory] if self.memory else [])])


def device_warning(trainer: RanksConfig) -> str:
    """`why_cpu` on this host; the nodes of a cluster have variables of their own."""
    return why_cpu(trainer.device) if trainer.ray_address is None else ""


def with_value(config: Any, key: str, value: Any) -> Any:
    name, _, rest = key.partition(".")
    return replace(config, **{name: with_value(getattr(config, name), rest, value) if rest else value})


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
