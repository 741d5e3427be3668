"""Messages between the processes that save one checkpoint together, as small objects of a storage that all see."""

from .storage import Storage

COORDINATION_PREFIX = ".async_"


class Messages:
    """Small texts by name, which every process of a run reads and writes; a text appears as a whole or not at all."""

    def __init__(self, storage: Storage, run_id: str, *, longest_poll_s: float) -> None:
        """`longest_poll_s`: the longest pause before a process looks again for a message that it waits for."""
        self._storage, self._folder = storage, f"{COORDINATION_PREFIX}{run_id}"
        self.longest_poll_s = longest_poll_s

    def __str__(self) -> str:
        return f"{self._storage.url}/{self._folder}"

    def write(self, name: str, text: str) -> None:
        """Create or replace a message."""
        self._storage.put_text(f"{self._folder}/{name}", text)

    def read(self, name: str) -> str | None:
        """The text of a message; None if there is none."""
        return self._storage.read_text(f"{self._folder}/{name}")

    def names(self) -> list[str]:
        """The names of all messages."""
        return self._storage.names(self._folder)

    def delete(self, name: str) -> None:
        """Delete a message; does nothing if another process has deleted it."""
        self._storage.delete_path(f"{self._folder}/{name}")

    def delete_all(self) -> None:
        """Delete all messages of this run."""
        self._storage.delete_path(self._folder)

    def delete_other_runs(self) -> None:
        """Delete the messages of dead runs of the same checkpoints. Only for the publisher."""
        for folder in self._storage.folders():
            if folder.startswith(COORDINATION_PREFIX) and folder != self._folder:
                self._storage.delete_path(folder)
