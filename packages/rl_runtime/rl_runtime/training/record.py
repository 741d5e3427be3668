"""Writes down what a run does: metrics, phase times, memory, traces and sampled rollouts."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rollout_vllm import Sample
from run_kit import Tracker
from run_kit.memory import MemorySampler
from run_kit.profiling import StepProfiler
from run_kit.timing import PhaseTimer

from ..launch.session import RankSession
from ..ranks.trainer_worker import TrainerWorker
from ..rollout.groups import Collected
from ..rollout.validation import Validation
from ..samples import group_numbers
from .ledger import SampleLedger


class RunRecord:
    """The tracker of a run with the measurements that go into it."""

    def __init__(
        self,
        tracker: Tracker,
        memory: MemorySampler,
        profiler: StepProfiler,
        session: RankSession,
        ledger: SampleLedger | None = None,
    ) -> None:
        """`ledger`: of a run that samples."""
        self._tracker, self._memory, self._profiler, self._session = tracker, memory, profiler, session
        self._ledger = ledger
        self._log_s = 0.0
        """Seconds that logging the last step took."""

    def info(self, text: str) -> None:
        """Prints a line and writes it to the log."""
        self._tracker.info(text)

    def rewind(self, step: int, metrics: Mapping[str, float]) -> None:
        """Forgets what was logged after this step, and logs its `metrics` if the run was lost before it did."""
        self._tracker.rewind(step, metrics)
        if self._ledger is not None:
            self._ledger.rewind(step)

    def first_values(self, *metrics: str) -> dict[str, float]:
        """The run's first value of each of these metrics that it has logged."""
        series = {name: self._tracker.table.series(name)[1] for name in metrics}
        return {name: values[0] for name, values in series.items() if values}

    @contextmanager
    def step(self, step: int) -> Iterator[PhaseTimer]:
        """Times a step; traces it if `trainer.profile_steps` names it."""
        timer = PhaseTimer()
        with self._profiler.step(step), timer.step():
            yield timer

    def log_samples(self, step: int, collected: Collected) -> None:
        """Writes down which samples the step has ended; before a checkpoint says so."""
        assert self._ledger is not None
        self._ledger.add(step, collected)

    def log_step(self, step: int, collected: Collected, metrics: dict[str, float], timer: PhaseTimer) -> None:
        """Writes the step's metrics, with times, throughput and memory, and some of its rollouts."""
        started = time.perf_counter()
        num_tokens = sum(path.token_ids.size for sample in collected.samples for path in sample.paths)
        self.log(step, metrics, timer, num_tokens=num_tokens)
        groups = group_numbers(collected.samples)
        self._tracker.log_rollouts(step, list(map(rollout_record, collected.samples, groups)))
        self._log_s = time.perf_counter() - started

    def log(self, step: int, metrics: dict[str, float], timer: PhaseTimer, *, num_tokens: int) -> None:
        """Writes a step's metrics, with times, throughput and memory."""
        started = time.perf_counter()
        times = timer.metrics()
        num_gpus = self._session.placement.num_gpus
        speed = {
            "perf/total_num_tokens": float(num_tokens),
            "perf/throughput": num_tokens / (times["timing_s/step"] * max(1, num_gpus)),  # per GPU; on the CPU in all
            "perf/log_s": self._log_s,
        }
        ranks = [rank for group in self._session.rank_groups for rank in group.run(TrainerWorker.memory_gb)]
        largest = {f"perf/{name}": max(rank[name] for rank in ranks) for name in ranks[0]}
        self._tracker.log(step, metrics | times | speed | self._memory.metrics() | largest)
        self._log_s = time.perf_counter() - started

    def log_held_out(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> None:
        """Writes the loss on held-out demonstrations, and responses to some of their prompts."""
        self._tracker.log_validation(step, metrics)
        self._tracker.log_rollouts(step, samples)

    def log_validation(self, step: int, result: Validation) -> None:
        """Writes the scores on the held-out prompts."""
        self._tracker.log_validation(step, result.metrics())


def rollout_record(sample: Sample, group: int) -> dict[str, Any]:
    """A sample as a line of `rollouts/step_*.jsonl`; `group` is the number of its group in the step."""
    return {
        "prompt": sample.prompt.text,
        **({"images": list(sample.prompt.images)} if sample.prompt.images else {}),
        "response": sample.text,
        "reward": sample.score,
        "reward_terms": dict(sample.reward_terms),
        "baseline_score": sample.baseline_score,
        "ground_truth": sample.prompt.ground_truth,
        "group": group,
        "finish_reason": sample.finish_reason,
        "policy_version": sample.policy_version,
        "version_spans": sample.generated_spans,
        "num_turns": sample.num_turns,
        "num_response_tokens": sample.num_generated,
        "num_context_tokens": sum(path.response_ids.size for path in sample.paths) - sample.num_generated,
        **({"tree": "\n".join(sample.tree)} if sample.tree else {}),
        **{name: value for name, value in sample.data.items() if name == "ignored_settings"},
    }
