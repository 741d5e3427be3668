"""The checkpoints of `AsyncSaver` in a folder that all ranks share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..digest import FileEntry
from ..manager import CheckpointManager
from ..reader import Checkpoint
from .storage import Storage


class SharedFolder:
    """The folder of a manager, which all processes see; files are written where they are published.

    `AsyncSaver` calls it from its background threads. The publishing process calls `open`, then `publish` or `abandon`;
    every process that writes calls `folder` and, with its files on the disk, `deliver`; all but the publishing process
    end with `finish`, or with `drop` if nothing was published. Processes exchange messages in `storage`, and look for
    one at least every `longest_poll_s` seconds.
    """

    longest_poll_s = 0.2

    def __init__(self, manager: CheckpointManager) -> None:
        self._manager, self.storage = manager, Storage(manager.root)

    def open(self, step: int, *, overwrite: bool, expected_bytes: int | None) -> str:
        """Begin the checkpoint of `step`; returns its name, by which the other processes know it."""
        return self._manager.prepare(step, overwrite=overwrite, expected_bytes=expected_bytes).name

    def folder(self, name: str, num_bytes: int) -> Path:
        """The folder into which this process writes `num_bytes`."""
        return self._manager.root / name

    def deliver(self, name: str, entries: Mapping[str, FileEntry]) -> None:
        """Does nothing: the files are where they are published."""

    def publish(self, name: str, step: int, **contents: Any) -> Checkpoint:
        """Publish the checkpoint; all processes have delivered their files."""
        return self._manager.publish(step, **contents)

    def abandon(self, name: str, step: int) -> None:
        """Delete what there is of a checkpoint that will not be published."""
        self._manager.abandon(step)

    def drop(self, name: str) -> None:
        """Does nothing: `abandon` deletes the files of all processes."""

    def cancel(self) -> None:
        """Does nothing: nothing is tried twice."""

    def finish(self, name: str, step: int) -> Checkpoint:
        """The checkpoint, after another process has published it."""
        return self._manager.read(step)
