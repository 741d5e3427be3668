"""The loop of a supervised run: optimizer steps, with validation and checkpoints."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ckpt import Checkpoint
from ds_engine import StepStats
from rl_data import PromptSampler
from run_kit import StopRequest

from ..config import FineTuningConfig, TrainingConfig
from ..ranks.model_handle import ModelHandle
from .checkpoints import RunCheckpoints, load_and_say, save_or_say
from .held_out import HeldOut
from .loop import Restart
from .metrics import update_metrics
from .record import RunRecord
from .supervised import DemonstrationLike, response_lens


class LongDemonstration(DemonstrationLike, Protocol):
    """A demonstration that knows its length."""

    @property
    def num_tokens(self) -> int: ...


Learn = Callable[[ModelHandle, Sequence[DemonstrationLike]], StepStats]
"""One optimizer step on a batch of demonstrations."""


@dataclass(frozen=True, kw_only=True)
class SupervisedResult:
    """The loss on the held-out demonstrations before the first and after the last step (None without validation)."""

    loss_before: float | None
    loss_after: float | None
    last_step: int

    def describe(self) -> str:
        """The losses in one line; empty without validation."""
        if self.loss_after is None:
            return ""
        before = "" if self.loss_before is None else f"{self.loss_before:.4f} before, "
        return f"held-out loss      {before}{self.loss_after:.4f} after"


class SupervisedLoop:
    """Trains on shuffled epochs of the demonstrations."""

    def __init__(
        self,
        trainer: TrainingConfig,
        config: FineTuningConfig,
        *,
        model: ModelHandle,
        demonstrations: Sequence[LongDemonstration],
        sampler: PromptSampler,
        held_out: HeldOut | None,
        checkpoints: RunCheckpoints,
        record: RunRecord,
    ) -> None:
        """`sampler` draws from the demonstrations; the checkpoints save its state."""
        self._trainer, self._config, self._model = trainer, config, model
        self._demonstrations, self._sampler, self._held_out = demonstrations, sampler, held_out
        self._checkpoints, self._record = checkpoints, record
        self._num_steps = config.num_steps(len(demonstrations))

    def run(
        self, learn: Learn, resume_from: Checkpoint | None, *, stop: StopRequest, restart: Restart | None = None
    ) -> SupervisedResult:
        """Takes all steps, or those after the checkpoint's.

        Args:
            stop: once it has a signal, the loop ends after the current step, with a checkpoint of that step.
            restart: the run has lost its ranks and continues in its folder, where later steps are recorded again.
        """
        with self._checkpoints:
            done = 0
            if resume_from is not None:
                load_and_say(self._checkpoints, resume_from, self._record.info)
                done = resume_from.step
            if restart is not None:
                self._record.rewind(done, {} if resume_from is None else resume_from.state.get("metrics", {}))
                self._record.info(restart.describe())
            before = None
            if self._trainer.val_before_train:
                before = self._record.first("val/loss") if restart is not None else self._validate(done)
            with stop.listen("stopping after this step, with a checkpoint and the model; again: stop now, without"):
                last, after = self._steps(done + 1, learn, stop)
        return SupervisedResult(loss_before=before, loss_after=after, last_step=last)

    def _steps(self, first: int, learn: Learn, stop: StopRequest) -> tuple[int, float | None]:
        """The steps from `first` on; returns the last step taken and the last held-out loss."""
        after = None
        for step in range(first, self._num_steps + 1):
            metrics = self._step(step, learn, stop)
            after = metrics.get("val/loss", after)
            if stop.signal and step < self._num_steps:
                if not self._checkpoints.is_due(step):
                    save_or_say(self._checkpoints, step, metrics, self._record.info)
                return step, after
        return self._num_steps, after

    def _step(self, step: int, learn: Learn, stop: StopRequest) -> dict[str, float]:
        """One step, with the validation and the checkpoint that follow it; returns its metrics."""
        held_out: dict[str, float] = {}
        with self._record.step(step) as timer:
            batch = self._next_batch(step)
            with timer.phase("update"):
                metrics = update_metrics("sft", [learn(self._model, batch)])
            metrics["sft/num_targets"] = float(response_lens(batch).sum())
            metrics["sft/epoch"] = self._num_drawn(step) / len(self._demonstrations)
            if self._held_out is not None and self._validates(step, stop):
                with timer.phase("validation", outside=True):
                    held_out = self._held_out.metrics(self._model)
            if self._checkpoints.is_due(step):
                with timer.phase("checkpoint"):
                    save_or_say(self._checkpoints, step, metrics | held_out, self._record.info)
        metrics |= self._checkpoints.take_metrics()
        self._record.log(step, metrics, timer, num_tokens=sum(item.num_tokens for item in batch))
        if held_out:
            self._log_held_out(step, held_out)
        return metrics | held_out

    def _num_drawn(self, step: int) -> int:
        """Demonstrations of the first `step` steps; the last step has what is left."""
        return min(step * self._config.batch_size, self._config.num_drawn(len(self._demonstrations)))

    def _next_batch(self, step: int) -> list[LongDemonstration]:
        size = self._num_drawn(step) - self._num_drawn(step - 1)
        return [self._demonstrations[index] for index in self._sampler.next(size)]

    def _validates(self, step: int, stop: StopRequest) -> bool:
        if step == self._num_steps:
            return self._trainer.val_after_train
        return not stop.signal and self._trainer.test_freq > 0 and step % self._trainer.test_freq == 0

    def _validate(self, step: int) -> float | None:
        """The held-out loss, written down; None without held-out demonstrations."""
        return None if self._held_out is None else self._log_held_out(step, self._held_out.metrics(self._model))

    def _log_held_out(self, step: int, metrics: dict[str, float]) -> float:
        assert self._held_out is not None
        self._record.log_held_out(step, metrics, self._held_out.samples(self._model))
        return metrics["val/loss"]
