"""Uploads published checkpoints from a background thread; training never waits for the storage."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeAlias

from ..errors import CheckpointDamagedError, UploadError
from ..manager import CheckpointManager
from ..pins import pinned
from ..reader import Checkpoint
from ..retention import Retention
from .remote import RemoteCheckpoints, storage_error

_log = logging.getLogger("ckpt")
_LONGEST_PAUSE_S = 300.0
_LARGEST_EXPONENT = 30

_Item: TypeAlias = Checkpoint | Path
"""A checkpoint, or a folder that does not change."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A finished upload."""

    name: str
    """`step 20`, or the name of a folder."""
    num_bytes: int
    duration_s: float


class AsyncUploader:
    """Uploads the checkpoints of a folder in the order of their steps, one at a time, and deletes old uploads.

        remote = RemoteCheckpoints("s3://bucket/run-7")
        with AsyncUploader(root, remote, retention=keep) as uploader:
            manager = CheckpointManager(root, retention=keep, on_publish=uploader.add)
            with AsyncSaver(manager) as saver:
                ...

    The retention does not delete a checkpoint while it is uploaded. It may delete one that still waits, which is then
    left out. The retention is applied to the uploads, too, after each upload.

    A failed upload is tried again after 1, 2, 4, ... seconds, at most 5 minutes, and before any newer checkpoint. The
    end of the block waits for all uploads; there, after `num_tries` failures in a row, it raises UploadError with the
    steps that the storage lacks. KeyboardInterrupt and SystemExit end the block at once. An upload that is cut off
    leaves nothing that counts as a checkpoint.
    """

    def __init__(
        self,
        root: Path,
        remote: RemoteCheckpoints,
        *,
        retention: Retention | None = None,
        report: Callable[[str], None] = _log.warning,
        num_tries: int = 5,
        pause_s: float = 1.0,
    ) -> None:
        """Starts no thread yet.

        Args:
            root: the checkpoint folder.
            retention: the one of the folder's manager; None keeps all.
            report: gets a line for each failure and each checkpoint that is left out, from the thread.
            num_tries: failures in a row after which the end of the block gives up.
            pause_s: seconds before the second try; doubled before each further one.
        """
        self._remote, self._report = remote, report
        self._retention = retention or Retention()
        self._manager = CheckpointManager(root, retention=retention)
        self._num_tries, self._pause_s = num_tries, pause_s
        self._changed = threading.Condition()
        self._waiting: deque[_Item] = deque()
        self._finished: list[Upload] = []
        self._damaged: list[_Item] = []
        self._why = ""
        self._closing, self._interrupted = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, checkpoint: Checkpoint) -> None:
        """Upload a checkpoint of the folder after those that were added before. Returns at once."""
        self._add(checkpoint)

    def add_folder(self, folder: Path) -> None:
        """Upload a folder that does not change, under its own name. Returns at once."""
        self._add(folder)

    def take_finished(self) -> list[Upload]:
        """The uploads that finished since the last call."""
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """Wait for all uploads. Raises UploadError with the steps that the storage lacks."""
        with self._changed:
            waiting = list(self._waiting)
        if waiting:
            self._report(f"waiting for uploads to {self._remote.url}: {', '.join(map(_name, waiting))}")
        self._end()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._manager.prune()  # what was kept for its upload
        self._manager.close()
        self._raise_missing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Exception):
            self._interrupted.set()
            self._end()
            return
        try:
            self.close()
        except UploadError as failed:
            if error is None:
                raise
            error.add_note(str(failed))

    def _add(self, item: _Item) -> None:
        with self._changed:
            self._waiting.append(item)
            self._changed.notify()
            if self._thread is None:
                # A daemon: a program that was interrupted does not wait for the storage.
                self._thread = threading.Thread(target=self._run, name="ckpt-upload", daemon=True)
                self._thread.start()

    def _end(self) -> None:
        """Let the thread end after what waits."""
        self._closing.set()
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        failures = 0
        while (item := self._oldest()) is not None:
            is_last_chance = self._closing.is_set()
            if self._upload(item):
                failures = 0
                continue
            failures += 1
            if is_last_chance and failures >= self._num_tries:
                return
            pause = min(self._pause_s * 2 ** min(failures - 1, _LARGEST_EXPONENT), _LONGEST_PAUSE_S)
            self._report(
                f"{_name(item)} could not be uploaded to {self._remote.url} ({self._why}); next try in {pause:.0f} s"
            )
            if is_last_chance:
                self._interrupted.wait(pause)
            elif self._closing.wait(pause):
                failures = 0

    def _oldest(self) -> _Item | None:
        """The next item, after waiting for one; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing.is_set())
            return self._waiting[0] if self._waiting and not self._interrupted.is_set() else None

    def _upload(self, item: _Item) -> bool:
        """Whether the item is done with; else `_why` says why it is to be tried again."""
        started = time.perf_counter()
        num_bytes: int | None = None
        try:
            num_bytes = self._send(item)
        except CheckpointDamagedError as error:  # no later try can succeed
            self._report(str(error))
            self._damaged.append(item)
            self._why = "damaged on the disk"
        except Exception as error:  # every storage has classes of its own
            self._why = storage_error(error)
            return False
        with self._changed:
            self._waiting.popleft()
            if num_bytes is not None:
                duration_s = time.perf_counter() - started
                self._finished.append(Upload(name=_name(item), num_bytes=num_bytes, duration_s=duration_s))
        return True

    def _send(self, item: _Item) -> int | None:
        """Uploads the item and returns its bytes; None if the retention has deleted it."""
        if isinstance(item, Path):
            return self._remote.upload_folder(item, item.name)
        with pinned(item.path) as exists:
            if not exists:
                self._report(f"{_name(item)} is not uploaded: the retention deleted it before its turn came")
                return None
            self._remote.upload(item, overwrite=True)
            num_bytes = self._manager.manifest(item.step).num_bytes
        try:
            self._remote.prune(self._retention, keep=item.step)
        except Exception as error:
            self._report(f"old uploads in {self._remote.url} could not be deleted: {storage_error(error)}")
        return num_bytes

    def _raise_missing(self) -> None:
        steps = self._manager.steps()
        missing = [item for item in (*self._damaged, *self._waiting) if isinstance(item, Path) or item.step in steps]
        if missing:
            raise UploadError(
                f"{self._remote.url} lacks {', '.join(map(_name, missing))} of {self._manager.root} ({self._why}). "
                "The folder has them; copy them before it is lost, for example with "
                f"python -m ckpt upload {self._manager.root} {self._remote.url}",
                steps=tuple(item.step for item in missing if isinstance(item, Checkpoint)),
            )


def _name(item: _Item) -> str:
    return item.name if isinstance(item, Path) else f"step {item.step}"
