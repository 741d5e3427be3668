"""A started training run, with or without rollout: what each attempt after a loss of ranks gets, and how to resume."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ckpt import AsyncUploader, Checkpoint
from ckpt.reader import CheckpointReader
from ds_engine import EngineConfig
from run_kit import RunFolder, Tracker
from run_kit.cli import INVOKED_AS

from ..config import TrainingConfig
from ..launch.session import RankSession
from ..training.local_disks import LocalDisks
from ..training.uploads import WARM_START_MODEL, remote_run
from .inputs import Inputs


class AppConfig(Protocol):
    """The configuration of a training app."""

    @property
    def trainer(self) -> TrainingConfig: ...


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A started run, from which its engines are built."""

    config: AppConfig
    session: RankSession
    tracker: Tracker
    inputs: Inputs
    folder: Path
    """The run folder."""
    resumed: Checkpoint | None
    uploader: AsyncUploader | None = None
    """With `trainer.checkpoint_url`: what uploads the checkpoints of the run."""
    local_disks: LocalDisks | None = None
    """With `trainer.local_disks`: what brings files to the other hosts."""

    @property
    def trainer(self) -> TrainingConfig:
        """The configuration section of every training app."""
        return self.config.trainer

    def for_ranks(self, folder: Path) -> str:
        """The path of a model folder that all ranks can read."""
        if self.local_disks is not None:
            self.local_disks.bring(folder, self.session.nodes)
        return str(folder)

    @property
    def warm_start_folder(self) -> Path:
        """Where the result of the warm start is, once it is done."""
        return self.folder / WARM_START_MODEL


def unsavable(engines: dict[str, EngineConfig]) -> str:
    """Why no checkpoint can hold the state of the engines, by section (`check_engine` refuses it with save_freq)."""
    sections = [section for section, engine in engines.items() if engine.zero.offload.optimizer == "nvme"]
    return f"{sections[0]}.zero.offload.optimizer is nvme, whose files no checkpoint holds" if sections else ""


def resumed_folder(checkpoint: Checkpoint | None) -> Path | None:
    """The folder of the run that saved the checkpoint; None without one."""
    return None if checkpoint is None else checkpoint.path.parents[1]


@contextmanager
def noting_resume_command(run: RunFolder, trainer: TrainingConfig) -> Iterator[None]:
    """Adds the command that resumes the run to an error that ends it, if there is a checkpoint."""
    try:
        yield
    except Exception as error:
        if command := resume_command(run, trainer):
            error.add_note(command)
        raise


def resume_command(run: RunFolder, trainer: TrainingConfig) -> str:
    """A sentence with the command that resumes the run; empty if there is no checkpoint, or its storage is away."""
    where, steps = str(run.path), CheckpointReader(run.path / "checkpoints").steps()
    if trainer.local_disks:
        remote = remote_run(trainer.checkpoint_url or "", run.path.name)
        with suppress(Exception):  # every storage has classes of its own
            where, steps = remote.url, remote.steps()
    if not steps:
        return ""
    command = INVOKED_AS.get() or "APP"
    return (
        f"To resume after step {max(steps)}: {command} config={shlex.quote(str(run.config_file))} "
        f"trainer.resume=auto trainer.resume_from={shlex.quote(where)}"
    )
