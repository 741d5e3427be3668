"""Shared by the tests of run_kit: a configuration of every shape the loader knows, a clock, TensorBoard events."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from plinth_base import PlinthError
from run_kit import TrackingConfig

QUIET = TrackingConfig(tensorboard=False, report=False, curves=False)


class SettingError(PlinthError, ValueError):
    """A setting that cannot work."""


@dataclass(frozen=True, kw_only=True)
class Zero:
    """Sharding."""

    stage: Literal[1, 2, 3] = 2
    """ZeRO stage."""
    offload: Literal["none", "cpu", "off"] = "none"
    """Device of the optimizer
    states."""
    bucket_bytes: int = 1000

    def __post_init__(self) -> None:
        if self.bucket_bytes == 7:
            raise ValueError("the section cannot work")
        if self.bucket_bytes == 5:
            raise SettingError("odd sizes are slow", field="bucket_bytes", value=5, remedy="take 6 or 8")
        if self.bucket_bytes <= 0:
            raise SettingError(field="bucket_bytes", value=self.bucket_bytes, allowed="above 0")


@dataclass(frozen=True, kw_only=True)
class Optim:
    lr: float = 1e-6
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    warmup: int | None = None


@dataclass(frozen=True, kw_only=True)
class Actor:
    zero: Zero = field(default_factory=Zero)
    optim: Optim = field(default_factory=Optim)
    enabled: bool = True


@dataclass(frozen=True, kw_only=True)
class Data:
    train: tuple[str, ...] = ()
    """Parquet files."""
    weights: list[float] = field(default_factory=list)
    system_prompt: str | None = None
    extra: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Example:
    """An example app."""

    experiment: str = "run"
    """Name of the run."""
    seed: int = 1
    """Seed of everything."""
    actor: Actor = field(default_factory=Actor)
    critic: Actor | None = None
    slow: Actor = Actor(optim=Optim(lr=0.5), enabled=False)
    data: Data = field(default_factory=Data)


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def read_events(folder: Path) -> list[tuple[int, str, float]]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    events = []
    for path in sorted(folder.iterdir()):
        for event in LegacyEventFileLoader(str(path)).Load():
            events += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return events
