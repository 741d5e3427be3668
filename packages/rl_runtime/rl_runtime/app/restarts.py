"""Continues a run whose ranks were lost: starts new ones from the newest checkpoint; the servers stay."""

import time
from dataclasses import replace

from ckpt import Checkpoint, CheckpointManager, capture_rng, restore_rng

from ..errors import PlacementError, RankError, RankLost
from ..training.loop import Restart
from .job import Job


class Restarts:
    """Counts the restarts of a run and prepares each of them.

    Args:
        job: the job as it was started.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        """The job of the next attempt."""
        self.restart: Restart | None = None
        """What the next attempt repeats; None for the first attempt."""
        self._started_from, self._rng = job.resumed, capture_rng()
        self._most, self._count = job.config.trainer.max_restarts, 0
        self._are_running = True

    def after(self, error: RankLost) -> None:
        """Decides where the run continues after `error`; raises it again if it cannot."""
        job = self.job
        last = max(job.tracker.table.steps, default=0)
        checkpoint = self._newest()
        if self._count == self._most:
            error.add_note(f"trainer.max_restarts is {self._most}: no restart is left")
            raise error
        if checkpoint is None and last > 0:
            error.add_note(
                f"The run has no checkpoint, so {last} steps are lost: trainer.save_freq={job.config.trainer.save_freq}"
            )
            raise error
        self._count += 1
        self._are_running = False
        done = 0 if checkpoint is None else checkpoint.step
        before, lost_at = self.restart, time.monotonic()
        if before is not None and (before.done, before.last) == (done, max(last, done)):
            lost_at = before.lost_at  # no step was taken since: the time of both losses counts
        self.restart = Restart(lost_at=lost_at, done=done, last=max(last, done))
        self.job = replace(job, resumed=checkpoint)
        if not job.warm_start_folder.is_dir():
            job.tracker.rewind_supervised()
        job.tracker.info(f"{error}; new ranks continue after step {done} (restart {self._count} of {self._most})")

    def start_ranks(self) -> None:
        """Starts new ranks, if those of the last attempt were lost.

        Raises:
            RankLost: a new rank was lost, too.
            RankError: too little is left of the cluster.
        """
        if self._are_running:
            return
        if self.job.resumed is None:
            restore_rng(self._rng)
        try:
            change = self.job.session.restart_ranks()
        except PlacementError as error:  # no mistake of the user's
            raise RankError(str(error)) from error
        if change:
            self.job.tracker.info(change)
        self._are_running = True

    def _newest(self) -> Checkpoint | None:
        """The newest good checkpoint of this run, else the one from which it was started.

        Damaged ones are removed: the run will save the same steps again.
        """
        tracker = self.job.tracker
        manager = CheckpointManager(self.job.folder / "checkpoints")
        try:
            found = manager.newest_good(on_skip=lambda step, why: tracker.info(f"checkpoint {step} is damaged: {why}"))
            newest = found or self._started_from
            if newest is not None and (removed := manager.discard_after(newest.step)):
                tracker.info(f"removed the damaged checkpoints {', '.join(map(str, removed))}")
        finally:
            manager.close()
        return newest
