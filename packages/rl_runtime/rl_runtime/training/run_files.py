"""The files of a run: a folder that all hosts share, or local disks (`trainer.local_disks`); uploads to a storage.

On local disks the storage carries a run's files from host to host.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from ckpt import (
    AsyncUploader,
    Checkpoint,
    CheckpointError,
    CheckpointLockedError,
    CheckpointManager,
    CheckpointUsageError,
    HostCheckpoints,
    RemoteCheckpoints,
    Retention,
    Upload,
)

from ..config import TrainingConfig
from ..errors import InputError
from ..launch.cluster import call_on_nodes, cluster_nodes
from ..launch.placement import Placement

WARM_START_MODEL = "warm_start_model"
"""Folder of a run with the model after the warm start, from which a resumed run builds its engines."""

DOWNLOADS = ".downloads"
"""Folder in `trainer.output_dir` for checkpoints that were downloaded, by run."""
_LOCK_PAUSE_S = 1.0


def retention(trainer: TrainingConfig) -> Retention:
    """The checkpoints that `trainer` keeps, in the run folder and below its URL."""
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


def published_run(trainer: TrainingConfig, name: str) -> RemoteCheckpoints | None:
    """The storage where the checkpoints of the run `name` count; None: they count in its folder, which hosts share."""
    return remote_run(trainer.checkpoint_url or "", name) if trainer.local_disks else None


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
            checkpoint = remote.download(step, folder, overwrite=True, parts=parts, on_file=sizes.append)
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


class RunFiles:
    """The files of a run whose hosts share its folder.

    Args:
        trainer: configuration of the run.
        run: the run folder.
        report: gets lines for the user.
        uploader: uploads the published checkpoints; None: nothing is uploaded from here.
    """

    rank_url: str | None = None
    """URL to which each rank uploads its own files; None: ranks write to the shared folder alone."""

    def __init__(
        self,
        trainer: TrainingConfig,
        run: Path,
        report: Callable[[str], None] = print,
        uploader: AsyncUploader | None = None,
    ) -> None:
        self._trainer, self._run, self._report, self._uploader = trainer, run, report, uploader
        self._uploads: AsyncUploader | HostCheckpoints | None = uploader

    def bring(self, folder: Path, nodes: Sequence[str]) -> None:
        """Copies a folder of the run that never changes, such as the model of the warm start, to each node."""

    def add_model(self, folder: Path) -> None:
        """Uploads the model of the warm start, without which checkpoints are useless."""
        if self._uploader is not None:
            self._uploader.add(folder)

    def open_store(self, folder: Path, nodes: Sequence[str]) -> CheckpointManager | HostCheckpoints:
        """Publishes the checkpoints that the ranks on `nodes` write into `folder`."""
        on_publish = None if self._uploader is None else self._uploader.add
        return CheckpointManager(folder, retention=retention(self._trainer), on_publish=on_publish)

    def take_finished(self) -> Sequence[Upload]:
        """The uploads that ended since the last call."""
        return () if self._uploads is None else self._uploads.take_finished()

    def fetch(self, checkpoint: Checkpoint, nodes: Sequence[str]) -> None:
        """Downloads a checkpoint that this host has to each node."""


class LocalDisks(RunFiles):
    """Brings the files of a run to the disks of its hosts, to the same path on each.

    The ranks upload their files; `report` gets a line for each failure of the storage.
    """

    def __init__(self, trainer: TrainingConfig, run: Path, report: Callable[[str], None]) -> None:
        super().__init__(trainer, run, report)
        self._run = run.absolute()
        self.remote = remote_run(trainer.checkpoint_url or "", run.name)
        """Storage in which the run publishes its checkpoints."""
        self.rank_url = self.remote.url

    def open_store(self, folder: Path, nodes: Sequence[str]) -> HostCheckpoints:
        """Publishes the uploads of the ranks in the storage."""
        self.make_run_folder(nodes)
        store = HostCheckpoints(folder.absolute(), self.remote, retention=retention(self._trainer), report=self._report)
        self._uploads = store
        return store

    def make_run_folder(self, nodes: Sequence[str]) -> None:
        """Creates the run folder on each node, as private as it is here.

        Raises RankLost if a node is lost.
        """
        self._call(_make_folder, nodes, self._run, self._trainer.private_output)

    def bring(self, folder: Path, nodes: Sequence[str]) -> None:
        """Copies a folder of the run that never changes, such as the model of the warm start, to each node.

        A folder elsewhere is the user's and must be on all nodes already. Raises RankLost if a node is lost.
        """
        folder = folder.absolute()
        if not folder.is_relative_to(self._run):
            return
        with naming_storage(self.remote.url):
            self.remote.upload_folder(folder, folder.name)
        self.make_run_folder(nodes)
        self._call(_download_folder, nodes, self.remote.url, folder)

    def fetch(self, checkpoint: Checkpoint, nodes: Sequence[str]) -> None:
        """Downloads a checkpoint that this host has from the storage to each node, without the files that it has.

        Raises RankLost if a node is lost, and ckpt.CheckpointError as `RemoteCheckpoints.download`.
        """
        folder = checkpoint.path.absolute().parents[1]
        url = source_of(self._trainer, folder.name).url
        sizes = self._call(_fetch_checkpoint, nodes, url, checkpoint.step, folder)
        gb = sum(sizes) / 1e9
        self._report(
            f"step {checkpoint.step} of {url} is on all {len(nodes)} hosts of ranks; downloaded now: {gb:.3g} GB"
        )

    def _call(self, function: Callable[..., float], nodes: Sequence[str], *args: object) -> list[float]:
        return call_on_nodes(function, nodes, *args, timeout_s=self._trainer.step_timeout_s)


@contextmanager
def open_run_files(trainer: TrainingConfig, run: Path, report: Callable[[str], None]) -> Iterator[RunFiles]:
    """The files of a run; with a `checkpoint_url` uploads to `<checkpoint_url>/<name of the run folder>`.

    The end of the context waits for the uploads.

    Raises:
        InputError: another run has uploaded to that folder.
        ckpt.UploadError: at the end, if checkpoints could not be uploaded.
    """
    if trainer.checkpoint_url is None:
        yield RunFiles(trainer, run, report)
        return
    remote = remote_run(trainer.checkpoint_url, run.name)
    with naming_storage(trainer.checkpoint_url):
        if remote.steps():
            problem = f"{remote.url} has the checkpoints of another run"
            raise InputError(problem, field="trainer.experiment", value=trainer.experiment, allowed="another name")
    if trainer.local_disks:
        report(
            f"trainer.local_disks: each host uploads the files of its ranks; checkpoints are published in {remote.url}"
        )
    if not trainer.save_freq:
        report("trainer.save_freq is 0: a checkpoint is written and uploaded only when a signal stops the run")
    if trainer.local_disks:
        yield LocalDisks(trainer, run, report)
    else:
        with AsyncUploader(run / "checkpoints", remote, retention=retention(trainer), report=report) as uploader:
            yield RunFiles(trainer, run, report, uploader)
    report(f"checkpoints in {remote.url}: {', '.join(f'step {step}' for step in remote.steps()) or 'none'}")


def check_checkpoint_url(trainer: TrainingConfig) -> None:
    """Raises InputError unless checkpoints can be uploaded; writes and deletes a small object."""
    if trainer.checkpoint_url is not None:
        with naming_storage(trainer.checkpoint_url):
            RemoteCheckpoints(trainer.checkpoint_url).check_writable()


def check_local_disks(trainer: TrainingConfig, placement: Placement) -> None:
    """With `trainer.local_disks`: raises InputError if rank 0 is on another host, or a host lacks the storage."""
    if not trainer.local_disks:
        return
    nodes = cluster_nodes()
    if (first := placement.ranks[0].node) != nodes[0].node_id:
        address = next(node.address for node in nodes if node.node_id == first)
        raise InputError(
            f"rank 0 would be on Ray node {address}: it writes the model, which then is not on this host",
            field="trainer.local_disks",
            value=True,
            remedy="start the run on a node that has ranks",
        )
    _check_shared_storage(trainer, placement.nodes)


def _check_shared_storage(trainer: TrainingConfig, nodes: Sequence[str]) -> None:
    """Raises InputError unless each node reads what this host writes to `trainer.checkpoint_url`, and can write."""
    assert trainer.checkpoint_url is not None, "TrainingConfig wants it with local_disks"
    name = f".plinth-{secrets.token_hex(8)}"
    with naming_storage(trainer.checkpoint_url):
        remote = RemoteCheckpoints(trainer.checkpoint_url)
        remote.put_text(name, "plinth")
        try:
            call_on_nodes(_check_storage, nodes, trainer.checkpoint_url, name, timeout_s=trainer.step_timeout_s)
        finally:
            remote.delete_path(name)


# Run on the nodes


def _make_folder(folder: Path, private: bool) -> float:
    folder.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
    return 0.0


def _download_folder(url: str, folder: Path) -> float:
    if not folder.is_dir():
        with naming_storage(url):
            RemoteCheckpoints(url).download_folder(folder.name, folder)
    return 0.0


def _fetch_checkpoint(url: str, step: int, folder: Path) -> float:
    with naming_storage(url):
        return fetch_checkpoint(RemoteCheckpoints(url), step, folder)[1]


def _check_storage(url: str, name: str) -> float:
    with naming_storage(url):
        remote = RemoteCheckpoints(url)
        if remote.read_text(name) is None:
            raise InputError(
                "this host does not see what the driver's host writes there",
                field="trainer.checkpoint_url",
                value=url,
                allowed="with trainer.local_disks a storage that all hosts share",
            )
        remote.check_writable()
    return 0.0
