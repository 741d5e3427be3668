"""What a supervised run learns: the update of a step, the measurements on held-out examples, and its state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ds_engine import StepStats

from ..ranks.model_handle import ModelHandle
from .checkpoints import Stateful
from .supervised import DemonstrationLike, response_lens, supervised_step


class Example(Protocol):
    """What a step draws: a demonstration, a pair of responses, or a labeled response."""

    @property
    def num_tokens(self) -> int: ...


class HeldOutLike(Protocol):
    """The held-out examples of a run."""

    def metrics(self, model: ModelHandle) -> dict[str, float]:
        """`val/loss` and further metrics; `val/accuracy` is in the run's summary."""
        ...

    def samples(self, model: ModelHandle) -> list[dict[str, Any]]:
        """Lines of `rollouts/`; empty without samples."""
        ...


Learn = Callable[[ModelHandle, Sequence[Any]], StepStats]
"""One optimizer step on a batch of examples, on the exact mean over the whole batch."""


def _nothing(*_: object) -> dict[str, float]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What a supervised run learns."""

    name: str
    """Prefix of the metrics of its steps."""
    learn: Learn
    held_out: HeldOutLike | None = None
    """None: no validation."""
    describe: Callable[[Sequence[Any]], Mapping[str, float]] = _nothing
    """Further metrics of a batch that need no model, by name without prefix."""
    prepare: Callable[[ModelHandle], None] | None = None
    """Called with the initial model before the first step, not in a run that resumes."""
    state: Mapping[str, Stateful] = field(default_factory=dict)
    """Further state that is saved and resumed; JSON-able."""


def fine_tuning(held_out: HeldOutLike | None) -> Objective:
    """Supervised fine-tuning on demonstrations."""
    return Objective(name="sft", learn=supervised_step, held_out=held_out, describe=_num_targets)


def _num_targets(batch: Sequence[DemonstrationLike]) -> dict[str, float]:
    return {"num_targets": float(response_lens(batch).sum())}
