"""The objective of a supervised run: the update of a step, the measurements on held-out examples, and its state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_engine import StepStats

from ..ranks.model_handle import ModelHandle
from .checkpoints import Stateful
from .held_out import HeldOut
from .supervised import supervised_step

Learn = Callable[[ModelHandle, Sequence[Any]], StepStats]
"""One optimizer step on a batch of examples, on the exact mean over the whole batch."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The objective of a supervised run."""

    name: str
    """Prefix of the metrics of its steps."""
    learn: Learn
    held_out: HeldOut | None = None
    """None: no validation."""
    prepare: Callable[[ModelHandle], None] = lambda _: None
    """Called with the initial model before the first step, not in a run that resumes."""
    state: Mapping[str, Stateful] = field(default_factory=dict)
    """Further state that is saved and resumed; JSON-able."""


def fine_tuning(held_out: HeldOut | None) -> Objective:
    """Supervised fine-tuning on demonstrations."""
    return Objective(name="sft", learn=supervised_step, held_out=held_out)
