"""Hosts that share no folder (`trainer.local_disks`): the storage carries a run's files from host to host."""

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from ckpt import Checkpoint, HostCheckpoints, RemoteCheckpoints

from ..config import TrainingConfig
from ..errors import InputError
from ..launch.cluster import call_on_nodes, cluster_nodes
from ..launch.placement import Placement
from .uploads import fetch_checkpoint, naming_storage, remote_run, retention, source_of


class LocalDisks:
    """Brings the files of a run to the disks of its hosts, to the same path on each.

    Args:
        trainer: its `local_disks` is true.
        run: the run folder.
        report: gets a line for each failure of the storage.
    """

    def __init__(self, trainer: TrainingConfig, run: Path, report: Callable[[str], None]) -> None:
        assert trainer.checkpoint_url is not None, "TrainingConfig wants it with local_disks"
        self._trainer, self._run, self._report = trainer, run.absolute(), report
        self.remote = remote_run(trainer.checkpoint_url, run.name)
        """The store of the run's checkpoints."""

    def store(self) -> HostCheckpoints:
        """Publishes in the storage what the ranks upload."""
        return HostCheckpoints(
            self._run / "checkpoints", self.remote, retention=retention(self._trainer), report=self._report
        )

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


def check_local_disks(trainer: TrainingConfig, placement: Placement) -> None:
    """With `trainer.local_disks`: raises InputError if rank 0 is on another host, or a host lacks the storage."""
    if not trainer.local_disks:
        return
    nodes = cluster_nodes()
    if (first := placement.ranks[0].node) != nodes[0].node_id:
        address = next(node.address for node in nodes if node.node_id == first)
        raise InputError(
            f"trainer.local_disks is true, but rank 0 would be on Ray node {address}: it writes the model, which "
            "then is not on this host; start the run on a node that has ranks"
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
                "this host does not see what the driver's host writes",
                field="trainer.checkpoint_url",
                value=url,
                allowed="with trainer.local_disks, a storage that all hosts share",
            )
        remote.check_writable()
    return 0.0
