"""The training loop: rollout, policy update, weight sync, with validation and checkpoints.

The app passes in the policy update as `learn`, a function from the step's samples to metrics.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from ckpt import Checkpoint

from ..config import TrainerConfig
from ..errors import RankError, RolloutFailed
from ..experience import ExperienceBatch, Phase
from ..rollout.servers import RolloutServers
from ..rollout.step_rollouts import StepRollouts
from .checkpoints import RunCheckpoints
from .metrics import rollout_metrics
from .record import RunRecord

Learn = Callable[[int, ExperienceBatch, Phase], dict[str, float]]
"""(step, scored samples, phase timer) -> metrics."""


@dataclass(frozen=True, kw_only=True)
class LoopResult:
    """Held-out accuracy before the first and after the last step (None without validation)."""

    accuracy_before: float | None
    accuracy_after: float | None
    num_steps: int


class TrainingLoop:
    """Runs the steps of `trainer`: samples from `rollouts`, update, push of the new weights to `servers`."""

    def __init__(
        self,
        trainer: TrainerConfig,
        *,
        rollouts: StepRollouts,
        servers: RolloutServers,
        checkpoints: RunCheckpoints,
        record: RunRecord,
    ) -> None:
        self._trainer, self._rollouts, self._servers = trainer, rollouts, servers
        self._checkpoints, self._record = checkpoints, record

    def run(self, learn: Learn, resume_from: Checkpoint | None = None) -> LoopResult:
        """Runs all steps, or those after the checkpoint's.

        Raises:
            rollout_vllm.ServerDiedError: a server died; the error that this caused is its context.
        """
        try:
            with self._checkpoints:
                return self._run(learn, resume_from)
        except (RankError, RolloutFailed):
            self._servers.check()
            raise

    def _run(self, learn: Learn, resume_from: Checkpoint | None) -> LoopResult:
        trainer = self._trainer
        done = 0
        with self._servers.changing_weights():
            if resume_from is not None:
                self._resume(resume_from)
                done = resume_from.step
            self._sync(version=done)
        before = self._validate(done) if trainer.val_before_train else None
        after = None
        for step in range(done + 1, trainer.total_training_steps + 1):
            self._step(step, learn)
            last = step == trainer.total_training_steps
            if (last and trainer.val_after_train) or (trainer.test_freq > 0 and step % trainer.test_freq == 0):
                after = self._validate(step)
        return LoopResult(accuracy_before=before, accuracy_after=after, num_steps=trainer.total_training_steps - done)

    def _step(self, step: int, learn: Learn) -> None:
        with self._record.step(step) as timer:
            self._servers.check()
            collected = self._rollouts.collect(step, timer.phase)
            if collected.reason:
                self._record.info(f"step {step}: {collected.num_failed} samples left out: {collected.reason}")
            if collected.note:
                self._record.info(f"step {step}: {collected.note}")
            with self._servers.changing_weights(timer.phase):
                metrics = rollout_metrics(collected) | learn(step, collected.batch, timer.phase)
                # Before the sync, after which the engines' memory may belong to the servers.
                if self._checkpoints.is_due(step) and (skipped := self._checkpoints.num_skipped_updates):
                    # The last good checkpoint must not make room for a model that has diverged.
                    self._record.info(f"step {step}: no checkpoint, because the last {skipped} updates were skipped")
                elif self._checkpoints.is_due(step):
                    with timer.phase("checkpoint"):
                        self._checkpoints.save(step, metrics)
                metrics |= self._sync(step, timer.phase)
        metrics |= self._servers.take_metrics()
        metrics["rollout/num_restarts"] = float(self._servers.num_restarts)
        self._record.log_step(step, collected, metrics, timer)

    def _sync(self, version: int, phase: Phase = nullcontext) -> dict[str, float]:
        """Pushes the actor's weights to the servers as policy `version`."""
        report = self._servers.push(version, phase)
        if report is None:  # no server is up; a restarted one gets the weights before it serves
            return {"sync/total_s": 0.0, "sync/num_bytes": 0.0}
        return {"sync/total_s": report.total_s, "sync/num_bytes": float(report.num_bytes)}

    def _validate(self, step: int) -> float | None:
        """Held-out accuracy of the weights on the servers; None without held-out prompts."""
        result = self._rollouts.validate(step)
        if result is None:
            return None
        self._record.log_validation(step, result)
        return result.accuracy

    def _resume(self, checkpoint: Checkpoint) -> None:
        self._checkpoints.load(checkpoint)
        num_ranks = checkpoint.state["num_ranks"]
        reshaped = f", saved with trainer.num_ranks={num_ranks}" if num_ranks != self._trainer.rank_count else ""
        self._record.info(f"resumed after step {checkpoint.step} from {checkpoint.path}{reshaped}")
