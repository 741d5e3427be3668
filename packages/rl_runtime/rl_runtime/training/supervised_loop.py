"""The loop of a supervised run and its objective: optimizer steps, with validation and checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt import Checkpoint
from ds_engine import StepStats
from rl_data import PromptSampler
from run_kit import StopRequest

from ..config import TrainingConfig
from ..ranks.model_handle import ModelHandle
from .checkpoints import RunCheckpoints, Stateful, load_and_say, save_or_say
from .held_out import HeldOut
from .loop import Restart
from .metrics import update_metrics
from .record import RunRecord
from .supervised import supervised_step
from .supervised_config import FineTuningConfig

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


@dataclass(frozen=True, kw_only=True)
class SupervisedResult:
    """Loss and accuracy on the held-out examples before the first and after the last step; None: not measured."""

    loss_before: float | None
    loss_after: float | None
    last_step: int
    accuracy_before: float | None = None
    accuracy_after: float | None = None

    def describe(self) -> str:
        """The losses in one line; empty without validation."""
        if self.loss_after is None:
            return ""
        before = "" if self.loss_before is None else f"{self.loss_before:.4f} before, "
        return f"held-out loss      {before}{self.loss_after:.4f} after"


class SupervisedLoop:
    """Trains on shuffled epochs of the examples."""

    def __init__(
        self,
        trainer: TrainingConfig,
        config: FineTuningConfig,
        *,
        model: ModelHandle,
        objective: Objective,
        examples: Sequence[Any],
        sampler: PromptSampler,
        checkpoints: RunCheckpoints,
        record: RunRecord,
    ) -> None:
        """`sampler` draws from the examples; the checkpoints save its state and that of the objective."""
        self._trainer, self._config, self._model = trainer, config, model
        self._objective, self._examples, self._sampler = objective, examples, sampler
        self._checkpoints, self._record = checkpoints, record
        self._num_steps = config.num_steps(len(examples))

    def run(
        self, resume_from: Checkpoint | None, *, stop: StopRequest, restart: Restart | None = None
    ) -> SupervisedResult:
        """Takes all steps, or those after the checkpoint's.

        Args:
            stop: once it has a signal, the loop ends after the current step, with a checkpoint of that step.
            restart: the run has lost its ranks and continues in its folder, where later steps are recorded again.
        """
        with self._checkpoints:
            done = load_and_say(self._checkpoints, resume_from, self._record.info)
            if resume_from is None:
                self._objective.prepare(self._model)
            if restart is not None:
                restart.begin(self._record, resume_from)
            before: dict[str, float] = {}
            held_out = self._objective.held_out
            if self._trainer.val_before_train and restart is not None:
                before = self._record.first_values("val/loss", "val/accuracy")
            elif self._trainer.val_before_train and held_out is not None:
                before = held_out.metrics(self._model)
                self._record.log_held_out(done, before, held_out.samples(self._model))
            with stop.listen("stopping after this step, with a checkpoint and the model; again: stop now, without"):
                last, after = self._steps(done + 1, stop)
        return SupervisedResult(
            loss_before=before.get("val/loss"),
            loss_after=after.get("val/loss"),
            accuracy_before=before.get("val/accuracy"),
            accuracy_after=after.get("val/accuracy"),
            last_step=last,
        )

    def _steps(self, first: int, stop: StopRequest) -> tuple[int, dict[str, float]]:
        """The steps from `first` on; returns the last step taken and the last metrics that have a held-out loss."""
        after: dict[str, float] = {}
        for step in range(first, self._num_steps + 1):
            metrics = self._step(step, stop)
            after = metrics if "val/loss" in metrics else after
            if stop.signal and step < self._num_steps:
                if not self._checkpoints.is_due(step):
                    save_or_say(self._checkpoints, step, metrics, self._record.info)
                return step, after
        return self._num_steps, after

    def _step(self, step: int, stop: StopRequest) -> dict[str, float]:
        """One step, with the validation and the checkpoint that follow it; returns its metrics."""
        objective, held_out_metrics = self._objective, dict[str, float]()
        with self._record.step(step) as timer:
            size = self._num_drawn(step) - self._num_drawn(step - 1)
            batch = [self._examples[index] for index in self._sampler.next(size)]
            with timer.phase("update"):
                metrics = update_metrics(objective.name, [objective.learn(self._model, batch)])
            metrics[f"{objective.name}/epoch"] = self._num_drawn(step) / len(self._examples)
            if objective.held_out is not None and self._validates(step, stop):
                with timer.phase("validation", outside=True):
                    held_out_metrics = objective.held_out.metrics(self._model)
            if self._checkpoints.is_due(step):
                with timer.phase("checkpoint"):
                    save_or_say(self._checkpoints, step, metrics | held_out_metrics, self._record.info)
        metrics |= self._checkpoints.take_metrics()
        self._record.log(step, metrics, timer, num_tokens=sum(item.num_tokens for item in batch))
        if objective.held_out is not None and held_out_metrics:
            self._record.log_held_out(step, held_out_metrics, objective.held_out.samples(self._model))
        return metrics | held_out_metrics

    def _num_drawn(self, step: int) -> int:
        """Examples of the first `step` steps; the last step has what is left."""
        return min(step * self._config.batch_size, self._config.num_drawn(len(self._examples)))

    def _validates(self, step: int, stop: StopRequest) -> bool:
        if step == self._num_steps:
            return self._trainer.val_after_train
        return not stop.signal and self._trainer.test_freq > 0 and step % self._trainer.test_freq == 0
