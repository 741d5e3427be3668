"""Continues a run whose ranks were lost: starts new ones from the newest checkpoint; the servers stay."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

from ckpt import Checkpoint, CheckpointManager, capture_rng, restore_rng

from ..errors import RankLost
from ..training.loop import Restart
from ..training.run_files import published_run
from .resume import newest_published
from .training_run import TrainingRun

RunT = TypeVar("RunT", bound=TrainingRun)
ResultT = TypeVar("ResultT")


class Restarts(Generic[RunT]):
    """Counts the restarts of a run and prepares each of them.

    Args:
        run: the run as it was started.
    """

    def __init__(self, run: RunT) -> None:
        self.run = run
        """The run of the next attempt."""
        self.restart: Restart | None = None
        """The steps that the next attempt repeats; None for the first attempt."""
        self._started_from, self._rng = run.resumed, capture_rng()
        self._most, self._count = run.trainer.max_restarts, 0
        self._are_running = True

    def after(self, error: RankLost) -> None:
        """Decides where the run continues after `error`; raises it again if it cannot."""
        run = self.run
        last = max(run.tracker.table.steps, default=0)
        checkpoint = self._newest()
        if self._count == self._most:
            error.add_note(f"trainer.max_restarts is {self._most}: no restart is left")
            raise error
        if checkpoint is None and last > 0:
            error.add_note(
                f"The run has no checkpoint, so {last} steps are lost: trainer.save_freq={run.trainer.save_freq}"
            )
            raise error
        self._count += 1
        self._are_running = False
        done = 0 if checkpoint is None else checkpoint.step
        before, lost_at = self.restart, time.monotonic()
        if before is not None and (before.done, before.last) == (done, max(last, done)):
            lost_at = before.lost_at  # no step was taken since: the time of both losses counts
        self.restart = Restart(lost_at=lost_at, done=done, last=max(last, done))
        self.run = replace(run, resumed=checkpoint)
        if not run.warm_start_folder.is_dir():
            run.tracker.rewind_supervised()
        run.tracker.info(f"{error}; new ranks continue after step {done} (restart {self._count} of {self._most})")

    def start_ranks(self) -> None:
        """Starts new ranks, if those of the last attempt were lost.

        Raises:
            RankLost: a new rank was lost, too.
            RankError: a node of the cluster was lost.
        """
        if self._are_running:
            return
        if self.run.resumed is None:
            restore_rng(self._rng)
        self.run.session.restart_ranks()
        self._are_running = True

    def attempts(self, attempt: Callable[[RunT, Restart | None], ResultT]) -> ResultT:
        """The result of `attempt`, which is called again after each loss of ranks that can be continued from."""
        while True:
            try:
                self.start_ranks()
                return attempt(self.run, self.restart)
            except RankLost as error:
                self.after(error)

    def _newest(self) -> Checkpoint | None:
        """The newest good checkpoint of this run, else the one from which it was started.

        Damaged ones are removed: the run will save the same steps again.
        """
        tracker = self.run.tracker
        trainer, name = self.run.trainer, self.run.folder.name
        if (remote := published_run(trainer, name)) is not None:
            return newest_published(remote, trainer, name, tracker.info) or self._started_from
        manager = CheckpointManager(self.run.folder / "checkpoints")
        try:
            saved = manager.newest_good(on_skip=lambda step, why: tracker.info(f"checkpoint {step} is damaged: {why}"))
            newest = saved or self._started_from
            if newest is not None and (removed := manager.discard_after(newest.step)):
                tracker.info(f"removed the damaged checkpoints {', '.join(map(str, removed))}")
        finally:
            manager.close()
        return newest
