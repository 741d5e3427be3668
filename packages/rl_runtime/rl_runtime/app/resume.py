"""Finds the checkpoint that a run resumes from, in the run folders here or below `trainer.checkpoint_url`."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckpt import Checkpoint, CheckpointDamagedError, CheckpointManager, RemoteCheckpoints, UnsupportedFormatError
from ckpt.reader import CheckpointReader
from run_kit import runs_of_experiment

from ..config import TrainingConfig, is_url
from ..errors import InputError, naming_key
from ..training.run_files import (
    DOWNLOADS,
    WARM_START_MODEL,
    fetch_checkpoint,
    naming_storage,
    published_run,
    remote_run,
)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A run that can be resumed: its folder here, its uploads, or both."""

    name: str
    folder: Path | None = None
    remote: RemoteCheckpoints | None = None
    download_to: Path
    only_uploads: bool = False
    """Only uploads count: other hosts cannot read the folder here (`trainer.local_disks`)."""
    with_model: bool = True
    """Download the model of the warm start, too."""

    def __str__(self) -> str:
        return str(self.folder) if self.folder is not None or self.remote is None else self.remote.url

    def newest_good(self, say: Callable[[str], None], on_damaged: Callable[[str], None]) -> Checkpoint | None:
        """The newest good checkpoint, downloaded if this host does not have it; None if there is none."""
        here = None
        if self.folder is not None and self.only_uploads:
            newest_upload = max(self._remote_steps(), default=-1)
            for step in CheckpointReader(self.folder / "checkpoints").steps():
                if step > newest_upload:
                    on_damaged(
                        f"step {step} of {self} is on this host only, and trainer.local_disks is true: upload it with "
                        "plinth ckpt upload"
                    )
        elif self.folder is not None:
            manager = CheckpointManager(self.folder / "checkpoints")
            here = manager.newest_good(on_skip=lambda step, why: on_damaged(f"step {step} of {self} is skipped: {why}"))
        for step in reversed(self._remote_steps()):
            if here is not None and here.step >= step:
                break
            try:
                return self._download(step, say)
            except (CheckpointDamagedError, UnsupportedFormatError) as error:
                on_damaged(f"step {step} of {self.name} is skipped: {error}")
        return here

    def _remote_steps(self) -> list[int]:
        if self.remote is None:
            return []
        with naming_storage(self.remote.url):
            return self.remote.steps()

    def _download(self, step: int, say: Callable[[str], None]) -> Checkpoint:
        """The checkpoint and the model of the warm start, as in a run folder."""
        assert self.remote is not None
        is_here = step in CheckpointReader(self.download_to / "checkpoints").steps()
        if not is_here:
            print(f"downloading step {step} of {self.remote.url}", file=sys.stderr, flush=True)
        with naming_storage(self.remote.url):
            checkpoint, num_bytes = fetch_checkpoint(self.remote, step, self.download_to)
            model = self.download_to / WARM_START_MODEL
            if self.with_model and not model.is_dir() and self.remote.has_folder(WARM_START_MODEL):
                self.remote.download_folder(WARM_START_MODEL, model)
        if is_here and not num_bytes:
            say(f"step {step} of {self.remote.url} was downloaded before to {checkpoint.path}")
        else:
            say(f"step {step} was downloaded from {self.remote.url} to {checkpoint.path}")
        return checkpoint


def find_checkpoint(trainer: TrainingConfig, on_skip: Callable[[str], None] = lambda _: None) -> Checkpoint | None:
    """The checkpoint that `resume=auto` resumes from, with verified files; None to start at step 1.

    Without `resume_from`, the newest run of the experiment counts that has a good checkpoint, here or below
    `checkpoint_url`; of that run the newest step. What this host lacks is downloaded to `<output_dir>/.downloads`.

    Args:
        on_skip: gets a line for each newer checkpoint or run that is passed over, with the reason, and for a download.

    Raises:
        InputError: `resume_from` is no run folder and no URL with checkpoints, the storage does not answer, no
            checkpoint can be read (unless `start_over_if_damaged`), no step is left to train, or the run had another
            seed.
    """
    if trainer.resume == "never":
        return None
    damaged: list[str] = []
    messages: list[str] = []
    with naming_key("trainer.output_dir" if trainer.resume_from is None else "trainer.resume_from"):
        runs = _runs_of_experiment(trainer) if trainer.resume_from is None else [_given_run(trainer)]
        newest = run = None
        for run in runs:
            if (newest := run.newest_good(messages.append, damaged.append)) is not None:
                break
    for line in (*damaged, *messages):
        on_skip(line)
    if newest is None or run is None:
        if damaged and not trainer.start_over_if_damaged:
            more = f", and {len(damaged) - 1} more" if len(damaged) > 1 else ""
            raise InputError(
                f"no checkpoint can be read: {damaged[0]}{more}",
                field="trainer.resume",
                value="auto",
                remedy="repair or remove them, or start at step 1 with trainer.start_over_if_damaged=true",
            )
        if damaged or trainer.resume_from is not None:
            on_skip(f"{runs[0]} has no good checkpoint: the run starts at step 1")
        return None
    if runs[0] != run:
        on_skip(f"{runs[0]} has no good checkpoint: the run resumes from the older {run}")
    if trainer.last_step is not None:
        check_steps_left(newest, trainer.last_step, key="trainer.total_training_steps", run=str(run))
    seed = newest.state.get("seed")
    if seed != trainer.seed:
        raise InputError(
            f"data order and samples of the run in {run} cannot be continued",
            field="trainer.seed",
            value=trainer.seed,
            allowed=f"{seed}, as in that run",
        )
    return newest


def check_steps_left(checkpoint: Checkpoint, last_step: int, *, key: str, run: str) -> None:
    """Raises InputError if the checkpoint is of the last step or a later one; `key` limits the steps."""
    if checkpoint.step >= last_step:
        raise InputError(
            f"the newest checkpoint in {run} is of step {checkpoint.step}: nothing is left to train",
            field=key,
            value=last_step,
            remedy="raise it",
        )


def _given_run(trainer: TrainingConfig) -> _Run:
    """The run that `trainer.resume_from` names."""
    given = trainer.resume_from or ""
    name = given.rstrip("/").rpartition("/")[2]
    download_to = _downloads(trainer) / name
    if not is_url(given):
        if not (Path(given) / "config.yaml").is_file():
            raise InputError(
                "it is no run folder: it has no config.yaml",
                field="trainer.resume_from",
                value=given,
                allowed="the folder of the run to resume, or null",
            )
        return _Run(name=name, folder=Path(given), download_to=download_to)
    with naming_storage(given, key="trainer.resume_from"):
        remote = RemoteCheckpoints(given)
        if not remote.steps():
            raise InputError(
                "it has no checkpoint",
                field="trainer.resume_from",
                value=given,
                allowed="the folder of a run below its trainer.checkpoint_url",
            )
    return _Run(name=name, remote=remote, download_to=download_to)


def _runs_of_experiment(trainer: TrainingConfig) -> list[_Run]:
    """The runs of this experiment, the newest first."""
    output, there = Path(trainer.output_dir), set[str]()
    if (url := trainer.checkpoint_url) is not None:
        with naming_storage(url):
            there = set(RemoteCheckpoints(url).names())
    return [
        _Run(
            name=name,
            folder=output / name if (output / name).is_dir() else None,
            remote=remote_run(url, name) if url is not None and name in there else None,
            download_to=_downloads(trainer) / name,
            only_uploads=published_run(trainer, name) is not None,
        )
        for name in runs_of_experiment(trainer.experiment, output, there)
    ]


def _downloads(trainer: TrainingConfig) -> Path:
    return Path(trainer.output_dir).absolute() / DOWNLOADS


def newest_published(
    remote: RemoteCheckpoints, trainer: TrainingConfig, name: str, say: Callable[[str], None]
) -> Checkpoint | None:
    """The newest good checkpoint of the run `name` in its storage `remote`, downloaded to this host.

    Newer ones that are damaged are deleted there: the run will save the same steps again.
    """
    run = _Run(name=name, remote=remote, download_to=_downloads(trainer) / name, with_model=False)
    newest = run.newest_good(say, say)
    with naming_storage(remote.url):
        for step in remote.steps():
            if step > (0 if newest is None else newest.step):
                remote.delete(step)
    return newest
