"""Stores for the checkpoints of `AsyncSaver`: the folder that all ranks share, or an object of the caller."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ..digest import FileEntry
from ..manager import CheckpointManager
from ..reader import Checkpoint
from .storage import Storage


class CheckpointStore(Protocol):
    """The place of `AsyncSaver`'s checkpoints, called from its background threads.

    The publishing process calls `open`, then `publish` or `abandon`; every process that writes calls `folder` and, with
    its files on the disk, `deliver`; all but the publishing process end with `finish`.
    """

    storage: Storage
    """Files that all processes see; in it they exchange messages."""
    longest_poll_s: float
    """The longest pause in seconds before a process looks again for a message of another."""

    def open(self, step: int, *, overwrite: bool, expected_bytes: int | None) -> str:
        """Begin the checkpoint of `step`; returns its name, by which the other processes know it."""

    def folder(self, name: str, num_bytes: int) -> Path:
        """The folder into which this process writes `num_bytes`."""

    def deliver(self, name: str, entries: Mapping[str, FileEntry]) -> None:
        """Bring the files that this process wrote to where the checkpoint is published; by default they are there."""
        return

    def publish(
        self,
        name: str,
        step: int,
        *,
        entries: Mapping[str, FileEntry],
        state: Mapping[str, Any],
        metrics: Mapping[str, float],
        models: Mapping[str, Mapping[str, Any]],
    ) -> Checkpoint:
        """Publish the checkpoint of these files; all processes have delivered theirs."""

    def abandon(self, name: str, step: int) -> None:
        """Delete what there is of a checkpoint that will not be published."""

    def drop(self, name: str) -> None:
        """Delete this process's files of a checkpoint that will not be published; by default `abandon` deletes all."""
        return

    def finish(self, name: str, step: int) -> Checkpoint:
        """The checkpoint, after another process has published it."""

    def cancel(self) -> None:
        """Stop trying: this process ends with an error. By default nothing is tried twice."""
        return


class SharedFolder(CheckpointStore):
    """The folder of a manager, which all processes see; files are written where they are published."""

    def __init__(self, manager: CheckpointManager) -> None:
        self._manager = manager
        self.storage, self.longest_poll_s = Storage(manager.root), 0.2

    def open(self, step: int, *, overwrite: bool, expected_bytes: int | None) -> str:
        return self._manager.prepare(step, overwrite=overwrite, expected_bytes=expected_bytes).name

    def folder(self, name: str, num_bytes: int) -> Path:
        return self._manager.root / name

    def publish(self, name: str, step: int, **contents: Any) -> Checkpoint:
        return self._manager.publish(step, **contents)

    def abandon(self, name: str, step: int) -> None:
        self._manager.abandon(step)

    def finish(self, name: str, step: int) -> Checkpoint:
        return self._manager.read(step)
