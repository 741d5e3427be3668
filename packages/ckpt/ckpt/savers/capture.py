"""What a background save can save: state that is copied to host memory at the call and written later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from ..manifest import FileEntry

__all__ = ["Capture"]


class Capture(ABC):
    """State that knows how to copy itself to host memory and how to write the copy; used again by every save.

    Given to `AsyncSaver.save` in place of a state dict. `take` runs in the calling thread, on every rank in the same
    order, and may use collectives; `copy` runs there too, or beside training, and `write` always beside: they may not.
    """

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Size of the copy held, in bytes."""

    @abstractmethod
    def take(self) -> None:
        """Note what is to be saved: copy what is small, begin to copy or refer to what is large."""

    def copy(self) -> None:  # noqa: B027  (one that copies everything in `take` has nothing left to do)
        """Copy what `take` refers to; when it returns, the originals may change."""

    @abstractmethod
    def write(self, folder: Path, name: str) -> Mapping[str, FileEntry]:
        """Write the copy below the checkpoint's `folder` in files that begin with `name`, forced to the disk.

        Returns the entries of the files by their path relative to `folder`. Raises CheckpointSpaceError when the disk
        is full.
        """
