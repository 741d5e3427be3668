"""What a background save can save: state that is copied to host memory at the call and written later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from .manifest import FileEntry

__all__ = ["Capture"]


class Capture(ABC):
    """State that knows how to copy itself to host memory and how to write the copy; used again by every save.

    Given to `AsyncSaver.save` in place of a state dict. `take` runs in the calling thread, on every rank in the same
    order, and may use collectives; `write` runs beside training and may not.
    """

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Size of the copy held, in bytes."""

    @abstractmethod
    def take(self) -> None:
        """Copy the state; when it returns, the originals may change."""

    @abstractmethod
    def write(self, folder: Path, name: str) -> Mapping[str, FileEntry]:
        """Write the copy below the checkpoint's `folder` in files that begin with `name`, forced to the disk.

        Returns the entries of the files by their path relative to `folder`. Raises CheckpointSpaceError when the disk
        is full.
        """
