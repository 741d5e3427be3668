"""Configuration of the built-in task: which one, and its numbers of problems, demonstrations and pairs."""

from dataclasses import dataclass
from typing import Literal

from ..config import check_at_least, check_value


@dataclass(frozen=True, kw_only=True)
class TaskSize:
    """The built-in task and its numbers of problems."""

    kind: Literal["arithmetic", "calculator", "stones"] = "arithmetic"
    """Additions with their working shown, larger additions with a calculator tool, or a game of taking stones."""
    num_train: int = 2000
    """Number of training problems."""
    num_val: int = 256
    """Number of held-out problems; their operand pairs are in no training problem."""
    num_demonstrations: int = 4000
    """Number of demonstrations for the warm start; four in ten show the working or call the calculator."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "num_train", "num_val", "num_demonstrations")


@dataclass(frozen=True, kw_only=True)
class PreferenceTaskSize(TaskSize):
    """The built-in task with its pairs of responses: the right calculation, and a wrong one or a wrong bare answer."""

    num_pairs: int = 4000
    """Number of training pairs."""
    num_val_pairs: int = 256
    """Number of held-out pairs; their operands are in no training pair and no demonstration."""
    slip_share: float = 0.0
    """Share of pairs whose rejected response is the right calculation but for one wrong number and what follows from
    it. A reward model that a policy will learn from needs them: they are the mistakes of the trained policy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, self, "num_pairs", "num_val_pairs")
        check_value(self, "slip_share", 0 <= self.slip_share <= 1, "0 to 1")
        check_value(self, "kind", self.kind == "arithmetic", "arithmetic, the only built-in task with preferences")
