"""Messages between the processes that save one checkpoint together."""

import shutil
from pathlib import Path
from typing import Protocol

from ..files import write_text

COORDINATION_PREFIX = ".async_"


class Messages(Protocol):
    """Small texts by name, which every process of a run reads and writes; a text appears as a whole or not at all."""

    longest_poll_s: float
    """The longest pause before a process looks again for a message that it waits for."""

    def write(self, name: str, text: str) -> None: ...
    def read(self, name: str) -> str | None:
        """The text; None if there is none."""

    def names(self) -> list[str]: ...
    def delete(self, name: str) -> None:
        """Does nothing if another process has deleted it."""

    def delete_all(self) -> None: ...
    def delete_other_runs(self) -> None:
        """Delete the messages of dead runs of the same checkpoints. Only for the publisher."""


class FolderMessages:
    """`Messages` as files of a folder that all processes see; they appear by rename."""

    longest_poll_s = 0.2

    def __init__(self, root: Path, run_id: str) -> None:
        self._root, self._folder = root, root / f"{COORDINATION_PREFIX}{run_id}"

    def __str__(self) -> str:
        return str(self._folder)

    def write(self, name: str, text: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_text(self._folder / name, text)

    def read(self, name: str) -> str | None:
        try:
            return (self._folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        return [path.name for path in self._folder.glob("*.*")]

    def delete(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def delete_all(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def delete_other_runs(self) -> None:
        for folder in self._root.glob(f"{COORDINATION_PREFIX}*"):
            if folder != self._folder:
                shutil.rmtree(folder, ignore_errors=True)
