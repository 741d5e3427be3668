"""A run's parts as one object that writes down what a loop does, for tests of loops without processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGTERM
from typing import Any, Self

from rl_runtime.config import TrainingConfig
from run_kit import StopRequest
from run_kit.timing import PhaseTimer


class Journal:
    """Checkpoints and record of a run.

    stop_in: (what the loop does, step) at which the signal comes.
    """

    def __init__(self, trainer: TrainingConfig, stop_in: tuple[str, int] | None, why_not: str = "") -> None:
        self.trainer, self._stop_in, self._why_not = trainer, stop_in, why_not
        self.stop = StopRequest()
        self.done: list[tuple[str, int]] = []
        self.said: list[str] = []
        self.is_started = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def note(self, event: str, step: int) -> None:
        self.done.append((event, step))
        if (event, step) == self._stop_in:
            self.stop.signal = SIGTERM

    def steps(self, event: str) -> list[int]:
        return [step for done, step in self.done if done == event]

    # checkpoints
    def is_due(self, step: int) -> bool:
        return self.trainer.save_freq > 0 and step % self.trainer.save_freq == 0

    def start(self, _say: Any) -> None:
        self.is_started = True

    def why_not(self) -> str:
        return self._why_not

    def save(self, step: int, _metrics: Any) -> None:
        self.note("save", step)

    def take_metrics(self) -> dict[str, float]:
        return {}

    # record
    @contextmanager
    def step(self, _step: int) -> Iterator[PhaseTimer]:
        timer = PhaseTimer()
        with timer.step():
            yield timer

    def info(self, text: str) -> None:
        self.said.append(text)
