"""The one training loop: rollout -> score -> learn -> sync, with validation, checkpoints and the run's record.

What is learned is the app's: it hands in `learn`, a function from the step's samples to metrics.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ckpt import Checkpoint
from rl_data import PromptSampler
from rollout_vllm import SamplingConfig
from run_kit.memory import MemorySampler
from run_kit.profiling import StepProfiler
from run_kit.timing import PhaseTimer
from run_kit.tracking import Tracker

from ..config import TrainerConfig
from ..errors import RankError, RolloutFailed
from ..experience import ExperienceBatch, PromptLike
from ..launch.session import Session
from ..ranks.trainer_worker import TrainerWorker
from ..rollout.phase import RolloutPhase
from ..rollout.servers import RolloutServers
from .checkpoints import RunCheckpoints
from .metrics import rollout_metrics, throughput

Phase = Callable[[str], AbstractContextManager[Any]]
Learn = Callable[[int, ExperienceBatch, Phase], dict[str, float]]
"""(step, scored samples, phase timer) -> metrics."""


@dataclass(frozen=True, kw_only=True)
class LoopResult:
    """Held-out accuracy before the first and after the last step (None where not asked for)."""

    accuracy_before: float | None
    accuracy_after: float | None
    num_steps: int


class TrainingLoop:
    """Runs the steps of `trainer`, drawing `train_batch_size` prompts each; `servers` get the actor's weights."""

    def __init__(
        self,
        *,
        trainer: TrainerConfig,
        sampling: SamplingConfig,
        validation: SamplingConfig,
        train_batch_size: int,
        train_prompts: Sequence[PromptLike],
        val_prompts: Sequence[PromptLike],
        sampler: PromptSampler,
        session: Session,
        servers: RolloutServers,
        rollout: RolloutPhase,
        tracker: Tracker,
        memory: MemorySampler,
        profiler: StepProfiler,
        checkpoints: RunCheckpoints,
        resumed: Checkpoint | None = None,
    ) -> None:
        self._trainer, self._sampling, self._validation = trainer, sampling, validation
        self._train_batch_size, self._sampler = train_batch_size, sampler
        self._train_prompts, self._val_prompts = train_prompts, val_prompts
        self._session, self._servers, self._rollout, self._tracker = session, servers, rollout, tracker
        self._memory, self._profiler = memory, profiler
        self._resumed = resumed
        self._checkpoints = checkpoints

    def run(self, learn: Learn) -> LoopResult:
        """All steps from where the checkpoint, if any, left off.

        Raises:
            rollout_vllm.ServerDiedError: a server died; whatever failed because of it is its context.
        """
        try:
            with self._checkpoints:
                return self._run(learn)
        except (RankError, RolloutFailed):
            self._servers.check()
            raise

    def _run(self, learn: Learn) -> LoopResult:
        trainer = self._trainer
        with self._servers.changing_weights():
            first = self._resume()
            self.sync(version=first)
        before = self.validate(first) if trainer.val_before_train else None
        after = None
        for step in range(first + 1, trainer.total_training_steps + 1):
            self._step(step, learn)
            last = step == trainer.total_training_steps
            if (last and trainer.val_after_train) or (trainer.test_freq > 0 and step % trainer.test_freq == 0):
                after = self.validate(step)
        return LoopResult(accuracy_before=before, accuracy_after=after, num_steps=trainer.total_training_steps - first)

    def sync(self, version: int) -> dict[str, float]:
        """Pushes the actor's weights into the servers as policy `version`."""
        report = self._servers.push(version)
        if report is None:  # no server is up; it gets them before it serves again
            return {"sync/total_s": 0.0, "sync/num_bytes": 0.0}
        return {"sync/total_s": report.total_s, "sync/num_bytes": float(report.num_bytes)}

    def validate(self, step: int) -> float | None:
        """Held-out accuracy of the weights the servers hold, logged under the step."""
        if not self._val_prompts:
            return None
        result = self._rollout.validate(self._val_prompts, self._validation, step=step)
        self._tracker.log_validation(
            step,
            {
                "val/accuracy": result.accuracy,
                "val/score/mean": result.score_mean,
                "val/num_samples": result.num_samples,
                "val/num_failed": result.num_failed,
            },
        )
        return result.accuracy

    def _step(self, step: int, learn: Learn) -> None:
        timer = PhaseTimer()
        with self._profiler.step(step, timer), timer.step():
            self._servers.check()
            num_prompts = self._rollout.num_prompts(self._train_batch_size)
            prompts = [self._train_prompts[i] for i in self._sampler.next(num_prompts)]
            collected = self._rollout.collect(prompts, self._sampling, step=step, phase=timer.phase)
            if collected.reason:
                self._tracker.info(f"step {step}: {collected.num_failed} samples left out: {collected.reason}")
            with self._servers.changing_weights():
                metrics = rollout_metrics(collected) | learn(step, collected.batch, timer.phase)
                with timer.phase("sync"):
                    metrics |= self.sync(version=step)
                if self._checkpoints.is_due(step):
                    with timer.phase("checkpoint"):
                        self._checkpoints.save(step, metrics)
        times = timer.metrics()
        metrics |= times
        metrics["perf/total_num_tokens"] = float(collected.batch.num_tokens)
        metrics["perf/throughput"] = throughput(
            collected.batch.num_tokens, times["timing_s/step"], self._session.placement.num_gpus
        )
        metrics["rollout/num_restarts"] = float(self._servers.num_restarts)
        metrics |= self._memory.metrics() | self._device_memory()
        self._tracker.log(step, metrics)
        self._tracker.log_rollouts(step, [rollout_record(item) for item in collected.batch.items])

    def _device_memory(self) -> dict[str, float]:
        ranks = [rank for group in self._session.rank_groups for rank in group.run(TrainerWorker.memory_gb)]
        return {f"perf/{name}": max(rank[name] for rank in ranks) for name in ranks[0]}

    def _resume(self) -> int:
        """Loads the checkpoint that was found before the start; the step it was written after."""
        if self._resumed is None:
            return 0
        self._checkpoints.load(self._resumed)
        num_ranks = self._resumed.state["num_ranks"]
        reshaped = f", saved with trainer.num_ranks={num_ranks}" if num_ranks != self._trainer.num_ranks else ""
        self._tracker.info(f"resumed after step {self._resumed.step} from {self._resumed.path}{reshaped}")
        return self._resumed.step


def rollout_record(item: Any) -> dict[str, Any]:
    """A sample as it is kept in `rollouts/`."""
    return {
        "prompt": item.prompt.text,
        "response": item.response_text,
        "reward": item.score,
        "ground_truth": item.prompt.ground_truth,
        "group": item.group_id,
        "finish_reason": item.finish_reason,
        "policy_version": item.policy_version,
        "version_spans": item.version_spans,
        "num_turns": item.num_turns,
        "num_response_tokens": item.num_generated,
        "num_context_tokens": len(item.response_ids) - item.num_generated,
    }
