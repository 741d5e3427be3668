"""Asynchronous rollout: the servers generate the groups of later steps while the trainer learns.

`Schedule` decides which groups may start and which ones a step trains on. Here each group is a task in the client's
event loop, which generates and scores it, also while new weights arrive.
"""

import queue
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from rollout_vllm import Group, Request, RolloutClient

from ..errors import RolloutFailed
from ..rules import check_value, value_of
from ..samples import Phase
from .dynamic_sampling import is_informative, select_informative
from .groups import Collected, Finish, from_state, largest, to_state
from .meter import RolloutMeter
from .schedule import Schedule
from .step_rollouts import StepRollouts
from .validation import Validation

_CHECK_S = 0.5
"""Seconds between two looks at the servers while a step waits for its groups."""


@dataclass(kw_only=True)
class _Held:
    """A group between drawing and training."""

    start: Request | Group
    """The request, or the samples of a checkpoint to resume."""
    task: Future[Group] | None = None
    """Generates and scores it; None before it starts."""
    scored: Group | None = None
    """Result of the task."""


class RolloutsAhead:
    """The rollouts of a run with `trainer.max_staleness` above 0; has the methods of `StepRollouts`.

    Of the thread of the training loop. A context manager: leaving it cancels what is being generated.

    Args:
        check: raises what ended the servers' work.
    """

    def __init__(
        self, rollouts: StepRollouts, client: RolloutClient, schedule: Schedule, *, check: Callable[[], None]
    ) -> None:
        self._rollouts, self._client, self._schedule, self._check = rollouts, client, schedule, check
        self._phase = rollouts.phase
        self._groups: dict[int, _Held] = {}
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._meter, self._busy_s = RolloutMeter(client), client.busy_s
        self._collected_at = time.perf_counter()

    def __enter__(self) -> "RolloutsAhead":
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._groups.values():
            if group.task is not None:
                group.task.cancel()

    @property
    def parts(self) -> dict[str, Any]:
        """Name -> what a checkpoint saves."""
        return {"sampler": self._rollouts.sampler, "rollout": self}

    def published(self, version: int) -> None:
        """The servers hold the weights of `version`: starts the groups that this allows."""
        self._schedule.publish(version)
        for number, group in self._groups.items():  # of a checkpoint
            if group.task is None and group.scored is None:
                start = group.start
                if isinstance(start, Request) or not start.num_tokens:
                    self._schedule.renew(number)
                self._start(number, group)
        for step, num_groups in self._schedule.due():
            self._draw(step, num_groups)
        self._note_ended()
        self._replace()

    def collect(self, step: int, timed: Phase) -> Collected:
        """The scored samples of a step; phase `gen` is the time for which the trainer waits for them.

        Raises:
            RolloutFailed: no sample is left to train on.
        """
        started = time.perf_counter()
        with timed("gen"):
            num_awaited = len([ticket for ticket in self._schedule.awaited(step) if not ticket.has_ended])
            self._wait(step)
            metrics = self._client.run(self._meter.read())
        taken = self._schedule.take(step)
        ended = [self._groups.pop(ticket.number).scored for ticket in taken]
        collected = self._collected(step, [group for group in ended if group is not None])
        dynamic, size = self._rollouts.dynamic_sampling, self._schedule.batch_size
        if dynamic.max_rounds:
            num_rounds = -(-len(taken) // size)
            collected = select_informative(collected, dynamic, num_groups=size, num_rounds=num_rounds, step=step)
        staleness = [step - 1 - sample.policy_version for sample in collected.samples]
        busy_before, self._busy_s = self._busy_s, self._client.busy_s
        before, self._collected_at = self._collected_at, time.perf_counter()
        busy_s = self._busy_s - busy_before
        metrics |= collected.metrics | {
            "rollout/trainer_wait_s": self._collected_at - started,
            "rollout/servers_wait_s": max(0.0, self._collected_at - before - busy_s),
            "rollout/busy_s": busy_s,
            "staleness/mean": sum(staleness) / len(staleness),
            "staleness/max": float(max(staleness)),
            "staleness/num_groups_ahead": float(len(self._schedule.tickets)),
        }
        if self._schedule.extra_groups:
            metrics["rollout/num_stale_awaited"] = float(num_awaited)
        return replace(collected, metrics=metrics)

    def _replace(self) -> None:
        """Dynamic sampling: draws a group for each whose scores do not differ, in all rounds of a step at most."""
        dynamic = self._rollouts.dynamic_sampling
        if not dynamic.max_rounds:
            return
        scored = [(number, group.scored) for number, group in self._groups.items() if group.scored is not None]
        useless = [number for number, group in scored if not is_informative(group.samples, dynamic)]
        at_most = dynamic.max_rounds * self._schedule.batch_size
        for step, num_groups in self._schedule.replacements(useless, at_most=at_most):
            self._draw(step, num_groups)

    def _draw(self, step: int, num_groups: int) -> None:
        prompts = self._rollouts.draw(num_groups)
        for ticket, prompt in zip(self._schedule.draw(step, num_groups), prompts, strict=True):
            request = self._phase.request(prompt, step=step, number=ticket.number)
            group = self._groups[ticket.number] = _Held(start=request)
            self._start(ticket.number, group)

    def _start(self, number: int, group: _Held) -> None:
        group.task = self._client.start(self._phase.play(group.start, self._rollouts.sampling))
        group.task.add_done_callback(lambda _: self._ended.put(number))

    def _wait(self, step: int) -> None:
        """Until the groups of `step` have ended.

        Raises:
            RolloutFailed: the reward hangs.
        """
        self._replace()
        while not self._schedule.is_ready(step):
            try:
                self._end(self._ended.get(timeout=_CHECK_S))
                self._replace()
            except queue.Empty:
                self._check()
            self._phase.check_scorer(step)

    def _note_ended(self) -> None:
        """Notes the results of all groups that have ended."""
        while not self._ended.empty():
            self._end(self._ended.get())

    def _end(self, number: int) -> None:
        """Notes the result of a group; raises what ended its task."""
        group = self._groups[number]
        assert group.task is not None, "a group ends once"
        group.scored, group.task = group.task.result(), None
        versions = [sample.policy_version for sample in group.scored.samples]
        self._schedule.end(number, min(versions, default=None))

    def _collected(self, step: int, ended: Sequence[Group]) -> Collected:
        kept = largest(ended, self._phase.min_samples(self._rollouts.sampling), at_most=len(ended))
        samples = tuple(sample for group in kept for sample in group.samples)
        num_failed = sum(group.size for group in ended) - len(samples)
        reason = next((failure.message for group in ended for failure in group.failures), "")
        if not samples:
            why = reason or "no group has two samples to compare"
            raise RolloutFailed(f"step {step}: none of {num_failed} samples was generated and scored: {why}")
        return Collected(
            samples=samples, policy_version=step - 1, num_failed=num_failed, reason=reason, ended=tuple(ended)
        )

    def validate(self, step: int, finish: Finish | None = None) -> Validation | None:
        """Scores on the held-out prompts after `step`, while the groups of later steps are generated."""
        return self._rollouts.validate(step, finish)

    def state_dict(self) -> dict[str, Any]:
        """Every group between drawing and training, JSON-able: scored ones with their samples, others with tokens.

        A response in flight has its tokens up to the last push of weights; an episode starts again.
        """
        self._note_ended()
        # The turns of an episode, and extra responses, have their groups' names.
        unfinished = self._client.partial_groups() if self._phase.is_resumable else ()
        partial = {group.prompt_id: group for group in unfinished}
        return {
            "schedule": self._schedule.state_dict(),
            "num_samples": self._rollouts.sampling.num_samples,
            "groups": {str(number): self._group_state(group, partial) for number, group in self._groups.items()},
        }

    def _group_state(self, group: _Held, partial: Mapping[str, Group]) -> dict[str, Any]:
        start = partial.get(group.start.prompt_id, group.start)
        if isinstance(start, Request):
            start = Group.fresh(start, self._rollouts.sampling.num_samples)
        state = to_state(start if group.scored is None else group.scored)
        return state | {"is_scored": group.scored is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`, which `check_groups` has accepted; `published` starts the groups."""
        if "schedule" not in state:
            return
        self._groups = {int(number): self._held(saved) for number, saved in state["groups"].items()}
        ended = [number for number, group in self._groups.items() if group.scored is not None]
        self._schedule.load_state_dict(state["schedule"], has_ended=ended)

    def _held(self, state: Mapping[str, Any]) -> _Held:
        group = from_state({name: value for name, value in state.items() if name != "is_scored"})
        group = self._phase.with_images(group)
        return _Held(start=group, scored=group if state["is_scored"] else None)


def check_groups(state: Mapping[str, Any], config: Any) -> None:
    """Refuses groups of a checkpoint's `rollout` that a run with this job configuration cannot train on.

    Raises:
        InputError: they are of another batch size or number of samples, unfinished or drawn ahead by a run with or
            without staleness, or more than a step without dynamic sampling trains on.
    """
    staleness, is_ahead = config.trainer.max_staleness, "schedule" in state
    if groups := state.get("groups" if is_ahead else "partial_rollouts"):
        of_run = "with" if is_ahead else "without"
        problem = f"the checkpoint has {len(groups)} unfinished groups of a run {of_run} staleness"
        allowed = "1 or more" if is_ahead else "0"
        check_value(config, "trainer.max_staleness", is_ahead == bool(staleness), allowed, problem=problem)
    if not is_ahead or not staleness:
        return
    saved = {"batch.train_batch_size": state["schedule"]["batch_size"], "sampling.n": state["num_samples"]}
    for key, value in saved.items():
        problem = "the checkpoint has groups that were drawn ahead with another value"
        check_value(config, key, value_of(config, key) == value, str(value), problem=problem)
    largest_step = max(Counter(ticket["step"] for ticket in state["schedule"]["tickets"]).values(), default=0)
    fits = largest_step <= config.batch.train_batch_size or config.dynamic_sampling.max_rounds > 0
    problem = "the checkpoint has groups that replace others"
    check_value(config, "dynamic_sampling.max_rounds", fits, "above 0", problem=problem)
