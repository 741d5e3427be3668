"""Uploads of a run's checkpoints to `trainer.checkpoint_url`."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from ckpt import (
    AsyncUploader,
    Checkpoint,
    CheckpointError,
    CheckpointLockedError,
    CheckpointManager,
    CheckpointUsageError,
    RemoteCheckpoints,
    Retention,
)

from ..config import TrainingConfig
from ..errors import InputError

WARM_START_MODEL = "warm_start_model"
"""Folder of a run with the model after the warm start, from which a resumed run builds its engines."""

DOWNLOADS = ".downloads"
"""Folder in `trainer.output_dir` for checkpoints that were downloaded, by run."""
_LOCK_PAUSE_S = 1.0


def retention(trainer: TrainingConfig) -> Retention:
    """Which checkpoints `trainer` keeps, in the run folder and below its URL."""
    return Retention(
        keep_last=trainer.keep_checkpoints,
        keep_every=trainer.keep_every or None,
        keep_best=trainer.keep_best or None,
        metric=trainer.best_metric if trainer.keep_best else None,
        mode=trainer.best_mode,
    )


def remote_run(url: str, name: str) -> RemoteCheckpoints:
    """The uploads of a run below `trainer.checkpoint_url`, by the name of its folder."""
    return RemoteCheckpoints(f"{url.rstrip('/')}/{name}")


def source_of(trainer: TrainingConfig, name: str) -> RemoteCheckpoints:
    """The uploads of the run `name`: that of `trainer.resume_from`, or one below `trainer.checkpoint_url`."""
    given = (trainer.resume_from or "").rstrip("/")
    if given.rpartition("/")[2] == name:
        return RemoteCheckpoints(given)
    return remote_run(trainer.checkpoint_url or "", name)


def fetch_checkpoint(remote: RemoteCheckpoints, step: int, run: Path) -> tuple[Checkpoint, int]:
    """The verified checkpoint in `<output_dir>/.downloads/<run>/checkpoints`, and the bytes downloaded.

    Files that this host's ranks wrote to the run folder with `trainer.local_disks` are linked. Waits while another
    process downloads to the same folder.
    """
    run.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    run.mkdir(exist_ok=True)
    folder, parts = run / "checkpoints", run.parents[1] / run.name / "checkpoints"
    sizes: list[int] = []
    while True:
        try:
            checkpoint = remote.download(
                step, folder, overwrite=True, parts=parts, on_file=lambda size, _: sizes.append(size)
            )
            with closing(CheckpointManager(folder, keep_last=1)) as manager:
                manager.discard_after(step)
                manager.prune()
            return checkpoint, sum(sizes)
        except CheckpointLockedError:
            time.sleep(_LOCK_PAUSE_S)


@contextmanager
def naming_storage(url: str, *, key: str = "trainer.checkpoint_url") -> Iterator[None]:
    """Errors of the storage name the configuration key that gave its URL.

    Raises InputError for all but those about a checkpoint.
    """
    try:
        yield
    except InputError:
        raise
    except CheckpointUsageError as error:
        raise InputError(error.problem, field=key, value=url) from error
    except CheckpointError:
        raise
    except Exception as error:  # every storage has classes of its own
        raise InputError(f"{type(error).__name__}: {error}", field=key, value=url) from error


def check_checkpoint_url(trainer: TrainingConfig) -> None:
    """Raises InputError unless checkpoints can be uploaded; writes and deletes a small object."""
    if trainer.checkpoint_url is not None:
        with naming_storage(trainer.checkpoint_url):
            RemoteCheckpoints(trainer.checkpoint_url).check_writable()


@contextmanager
def open_uploader(trainer: TrainingConfig, run: Path, report: Callable[[str], None]) -> Iterator[AsyncUploader | None]:
    """Uploads to `<checkpoint_url>/<name of the run folder>` within the context, whose end waits for them.

    Yields None if there is nothing to upload from here: no URL, or `trainer.local_disks`, where the ranks do it.

    Raises:
        InputError: another run has uploaded to that folder.
        ckpt.UploadError: at the end, if checkpoints could not be uploaded.
    """
    if trainer.checkpoint_url is None:
        yield None
        return
    remote = remote_run(trainer.checkpoint_url, run.name)
    with naming_storage(trainer.checkpoint_url):
        if remote.steps():
            raise InputError(
                f"{remote.url} has the checkpoints of another run",
                field="trainer.experiment",
                value=trainer.experiment,
                remedy="give another name",
            )
    if trainer.local_disks:
        report(
            f"trainer.local_disks: each host uploads the files of its ranks; checkpoints are published in {remote.url}"
        )
    if not trainer.save_freq:
        report("trainer.save_freq is 0: a checkpoint is written and uploaded only when a signal stops the run")
    if trainer.local_disks:
        yield None
    else:
        with AsyncUploader(run / "checkpoints", remote, retention=retention(trainer), report=report) as uploader:
            yield uploader
    report(f"checkpoints in {remote.url}: {', '.join(f'step {step}' for step in remote.steps()) or 'none'}")
