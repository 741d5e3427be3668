"""Uploads published checkpoints from a background thread; training never waits for the storage."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Self, TypeAlias

from ..errors import UploadError
from ..manager import CheckpointManager, pinned
from ..reader import Checkpoint
from ..retention import Retention
from .remote import RemoteCheckpoints
from .storage import Retry

_log = logging.getLogger("ckpt")

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

    A failed request is repeated until the block ends, then for `retry_s` seconds; UploadError names the steps that the
    storage lacks. KeyboardInterrupt and SystemExit end the block at once. An upload that is cut off leaves
    nothing that counts as a checkpoint.
    """

    def __init__(
        self,
        root: Path,
        remote: RemoteCheckpoints,
        *,
        retention: Retention | None = None,
        report: Callable[[str], None] = _log.warning,
        retry_s: float = 30.0,
    ) -> None:
        """Starts the thread.

        Args:
            root: the checkpoint folder.
            retention: the one of the folder's manager; None keeps all.
            report: gets a line for each failure and each checkpoint that is left out, from the thread.
            retry_s: seconds for which a failing request is repeated once the block has ended.
        """
        self._retry, self._retry_s = Retry(report), retry_s
        self._remote, self._report, self._retention = remote.with_retry(self._retry), report, retention
        self._manager = CheckpointManager(root, retention=retention)
        self._queue = Queue[_Item | None]()
        self._failed: list[tuple[_Item, str]] = []
        self._finished: deque[Upload] = deque()
        # A daemon: a program that was interrupted does not wait for the storage.
        self._thread = threading.Thread(target=self._run, name="ckpt-upload", daemon=True)
        self._thread.start()

    def add(self, item: Checkpoint | Path) -> None:
        """Upload a checkpoint of the folder, or another folder that does not change, after those added before.

        Returns at once. A folder is uploaded under its own name.
        """
        self._queue.put(item)

    def take_finished(self) -> list[Upload]:
        """The uploads that finished since the last call."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def close(self) -> None:
        """Wait for all uploads. Raises UploadError with the steps that the storage lacks."""
        if num_open := self._queue.unfinished_tasks:
            self._report(f"waiting for {num_open} upload{'s' * (num_open > 1)} to {self._remote.url}")
        self._queue.put(None)
        self._retry.limit(self._retry_s)
        self._thread.join()
        self._manager.prune()  # what was kept for its upload
        self._manager.close()
        self._raise_missing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Exception):
            self._retry.limit()
            self._queue.put(None)
            return
        try:
            self.close()
        except UploadError as failed:
            if error is None:
                raise
            error.add_note(str(failed))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            started = time.perf_counter()
            try:
                num_bytes = self._upload(item)
            except Exception as error:  # of the storage, or the checkpoint is damaged on the disk
                self._failed.append((item, str(error)))
                with suppress(Exception):  # `close` names it too; without the thread nothing would be uploaded
                    self._report(str(error))
            else:
                if num_bytes is not None:
                    duration_s = time.perf_counter() - started
                    self._finished.append(Upload(name=_name(item), num_bytes=num_bytes, duration_s=duration_s))
            self._queue.task_done()

    def _upload(self, item: _Item) -> int | None:
        """Upload the item and return its bytes; None if the retention has deleted it."""
        if isinstance(item, Path):
            return self._remote.upload_folder(item, item.name)
        with pinned(item.path) as exists:
            if not exists:
                self._report(f"{_name(item)} is not uploaded: the retention deleted it before its turn came")
                return None
            self._remote.upload(item, overwrite=True, retention=self._retention)
            return self._manager.manifest(item.step).num_bytes

    def _raise_missing(self) -> None:
        steps = self._manager.steps()
        missing = [(item, why) for item, why in self._failed if isinstance(item, Path) or item.step in steps]
        if missing:
            raise UploadError(
                f"{self._remote.url} lacks {', '.join(_name(item) for item, _ in missing)} of {self._manager.root} "
                f"({missing[-1][1]})",
                steps=tuple(item.step for item, _ in missing if isinstance(item, Checkpoint)),
                remedy="copy them before the folder is lost: "
                f"python -m ckpt upload {self._manager.root} {self._remote.url}",
            )


def _name(item: _Item) -> str:
    return item.name if isinstance(item, Path) else f"step {item.step}"
