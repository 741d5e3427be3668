"""Checkpoints of a run: the ranks write them in the background, the driver publishes and loads them."""

import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from ckpt import (
    AsyncSaver,
    Checkpoint,
    SaverRanks,
    capture_rng,
    check_model,
    restore_rng,
)

from ..config import TrainingConfig
from ..errors import InputError
from ..ranks.model_handle import ModelHandle
from ..ranks.trainer_worker import ModelDescription, TrainerWorker
from ..ranks.worker_group import WorkerGroup
from .run_files import RunFiles


class Stateful(Protocol):
    """Part of a run's state that is saved in checkpoints, in addition to the engines; JSON-able."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class RunCheckpoints:
    """Saves and loads the engines, random generators and `parts` of a run under one step number.

    A step waits only for the copy to host memory. A context manager: leaving it waits for the save in progress.
    """

    def __init__(
        self,
        folder: Path,
        trainer: TrainingConfig,
        rank_groups: Sequence[WorkerGroup],
        *,
        roles: Mapping[str, ModelHandle],
        parts: Mapping[str, Stateful],
        config: str,
        inputs: Mapping[str, str] | None = None,
        unsavable: str = "",
        files: RunFiles | None = None,
    ) -> None:
        """Opens nothing yet.

        Args:
            config: YAML without secrets, kept in each checkpoint for readers without the run folder.
            inputs: digests of the run's inputs, which a resume compares with its own.
            unsavable: why no checkpoint can hold this run's state; empty if one can.
            files: the files of the run, which the caller waits for; None: all ranks see `folder`, nothing is uploaded.
        """
        self._folder, self._trainer, self._groups = folder, trainer, rank_groups
        self._roles, self._parts, self._config, self._inputs = roles, parts, config, dict(inputs or {})
        self._unsavable = unsavable
        self._files = files or RunFiles(trainer, folder.parent)
        self._saver: AsyncSaver | None = None

    def __enter__(self) -> "RunCheckpoints":
        if self._trainer.save_freq:  # a folder that cannot be written ends the run before its first step
            self._saver = self._open()
        return self

    def _open(self) -> AsyncSaver:
        run_id = uuid.uuid4().hex
        num_ranks = sum(group.world_size for group in self._groups)
        ranks = SaverRanks(num_ranks=num_ranks, rank=None, run_id=run_id, publisher=None)
        saver = AsyncSaver(self._files.open_store(self._folder, self._nodes), ranks=ranks)
        url = self._files.rank_url
        for group, first in self._numbered_groups():
            group.run(TrainerWorker.open_saver, str(self._folder.absolute()), run_id, first, num_ranks, url)
        return saver

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._saver is None:
            return
        if error is None:
            for group in self._groups:
                group.run(TrainerWorker.close_saver)
        self._saver.__exit__(kind, error, trace)

    @property
    def num_ranks(self) -> int:
        """Number of the actor's ranks."""
        return self._groups[0].world_size

    def is_due(self, step: int) -> bool:
        """True if `trainer.save_freq` wants a checkpoint after this step."""
        return self._trainer.save_freq > 0 and step % self._trainer.save_freq == 0

    def why_not(self) -> str:
        """Reason why no checkpoint may be written now; empty if one may."""
        # The last good checkpoint must not make room for a model that has diverged.
        skipped = max(role.skipped.in_a_row for role in self._roles.values())
        return f"the last {skipped} updates were skipped" if skipped else self._unsavable

    def save(self, step: int, metrics: Mapping[str, float]) -> None:
        """Saves the state after `step`.

        Raises:
            ckpt.CheckpointError: an earlier save failed on any rank.
        """
        saver = self._saver = self._saver or self._open()
        for group in self._groups:
            roles = {name: model.name for name, model in self._roles.items() if model.ranks is group}
            group.run(TrainerWorker.save, step, roles)
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        state = {
            "step": step,
            "metrics": finite,
            "policy_version": step,
            "num_ranks": self.num_ranks,
            "seed": self._trainer.seed,
            "rng": capture_rng(),
            "config": self._config,
            "inputs": self._inputs,
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
        }
        saver.save(step, {}, state=state, metrics=finite, models=self._models)
        if not self._trainer.background_save:
            saver.wait()

    def take_metrics(self) -> dict[str, float]:
        """Seconds and bytes of the uploads that ended since the last call; empty if none did."""
        uploads = self._files.take_finished()
        if not uploads:
            return {}
        return {
            "checkpoint/upload_s": sum(upload.duration_s for upload in uploads),
            "checkpoint/upload_bytes": float(sum(upload.num_bytes for upload in uploads)),
        }

    def load(self, checkpoint: Checkpoint) -> None:
        """Restores the state of the run at `checkpoint`.

        Raises, before it changes anything:
            InputError: the checkpoint lacks an engine of this run.
            ckpt.ArchitectureMismatchError: its models or adapters have other parameters.

        Raises InputError also if the checkpoint is deleted before it is loaded.
        """
        try:
            self._load(checkpoint)
        except Exception as error:
            if checkpoint.path.is_dir():
                raise
            raise InputError(
                f"{checkpoint.path} is gone: the run that wrote it goes on, and keeps newer checkpoints only",
                field="trainer.resume_from",
                remedy="stop that run, and resume from its newest checkpoint",
            ) from error

    def start(self, say: Callable[[str], None]) -> None:
        """Gives the engines of a new run the states of `trainer.states_from`, and says so.

        Raises:
            ckpt.CheckpointError: on a rank, the folder has other parameters.
        """
        for name, folder in self._trainer.states_from.items():
            self._roles[name].start_from(str(Path(folder).absolute()))
            say(f"{name} starts with the weights and the optimizer of {folder}")

    def _load(self, checkpoint: Checkpoint) -> None:
        self._files.fetch(checkpoint, self._nodes)
        for name, model in self._models.items():
            if not (checkpoint.path / name).is_dir():
                raise InputError(
                    f"{checkpoint.path} has no {name!r}, and nothing was loaded",
                    remedy="resume with the app that wrote it",
                )
            check_model(checkpoint, name, model)
        for name, role in self._roles.items():
            role.load(str(checkpoint.path / name))
        for group, first in self._numbered_groups():
            group.run(TrainerWorker.load_rng, str(checkpoint.path), first)
        restore_rng(checkpoint.state["rng"])
        saved = checkpoint.state["parts"]
        for name, part in self._parts.items():
            if name in saved:  # earlier versions had fewer parts; a new one starts as in a new run
                part.load_state_dict(saved[name])

    @cached_property
    def _models(self) -> dict[str, ModelDescription]:
        """Names and shapes of every engine's parameters."""
        return {name: role.describe() for name, role in self._roles.items()}

    @property
    def _nodes(self) -> tuple[str, ...]:
        """Ray's ids of the ranks' nodes."""
        return tuple(dict.fromkeys(node for group in self._groups for node in group.nodes))

    def _numbered_groups(self) -> Iterator[tuple[WorkerGroup, int]]:
        """Every group and the number of its first rank in a checkpoint."""
        first = 0
        for group in self._groups:
            yield group, first
            first += group.world_size


def save_or_say(
    checkpoints: RunCheckpoints, step: int, metrics: Mapping[str, float], say: Callable[[str], None]
) -> None:
    """Saves the state after `step`, or says why there is nothing that can or should be saved."""
    if why := checkpoints.why_not():
        say(f"step {step}: no checkpoint, because {why}")
    else:
        checkpoints.save(step, metrics)


def load_and_say(checkpoints: RunCheckpoints, checkpoint: Checkpoint | None, say: Callable[[str], None]) -> int:
    """Restores the state of the run at `checkpoint`, or that of a new run, and says so; returns its step."""
    if checkpoint is None:
        checkpoints.start(say)
        return 0
    checkpoints.load(checkpoint)
    num_ranks = checkpoint.state["num_ranks"]
    reshaped = f", saved with trainer.num_ranks={num_ranks}" if num_ranks != checkpoints.num_ranks else ""
    say(f"resumed after step {checkpoint.step} from {checkpoint.path}{reshaped}")
    return checkpoint.step
