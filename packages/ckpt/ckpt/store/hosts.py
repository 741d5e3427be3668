"""Checkpoints of ranks whose hosts share no folder: each process uploads its own files, one process publishes them.

    <URL>/.async_<run id>/                  messages between the processes of a save
    <URL>/step_00000020.<time>-<digits>/    the files of all hosts; the manifest comes last and publishes them
    root/.part_step_00000020.<...>/         on each host's disk: the files that its processes wrote

`RemoteCheckpoints` reads it. A kill at any instant leaves the earlier checkpoints as they were: nothing counts without
a manifest, which one process writes after all others have reported their uploads, and no name is used twice.
"""

import json
import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..digest import FileEntry
from ..errors import CheckpointUsageError
from ..files import check_space
from ..manager import state_to_json, write_state
from ..manifest import CheckpointManifest, describe_files
from ..reader import STATE_NAME, Checkpoint
from ..retention import Retention
from .remote import PART_PREFIX, RemoteCheckpoints, upload_time
from .storage import Retry, Storage
from .uploader import Upload

_log = logging.getLogger("ckpt")


class HostCheckpoints:
    """Checkpoints of ranks on hosts with local disks; pass one to the `AsyncSaver` of each process.

        remote = RemoteCheckpoints("s3://bucket/run-7")
        store = HostCheckpoints(Path("run/checkpoints"), remote, retention=keep)     # in every process
        with AsyncSaver(store, ranks=SaverRanks(num_ranks=8, rank=rank, run_id=run_id)) as saver:
            saver.save(20, {"model": model.state_dict()}, state={"epoch": 1})
        ...
        checkpoint = remote.download(20, Path("run/fetched"), parts=Path("run/checkpoints"))

    The `path` of a checkpoint that `AsyncSaver.wait` returns is the folder with this host's files only. A host keeps
    the files of its newest checkpoint, so that a resume there downloads only those of the other hosts.
    """

    def __init__(
        self,
        root: Path,
        remote: RemoteCheckpoints,
        *,
        retention: Retention | None = None,
        report: Callable[[str], None] = _log.warning,
        retry_s: float = 900.0,
    ) -> None:
        """Connects to nothing yet.

        Args:
            root: a folder of this host, which its processes share.
            retention: which checkpoints the publishing process keeps below the URL; None keeps all.
            report: gets a line for each failure of the storage, from the thread.
            retry_s: seconds for which a failing request is repeated before the save fails.
        """
        self._retry = Retry(report, retry_s=retry_s)
        self._root, self._remote = Path(root), remote.with_retry(self._retry)
        self.storage: Storage = self._remote
        self._retention, self.longest_poll_s = retention, 1.0
        self._opened = 0.0
        self._finished: deque[Upload] = deque()

    def open(self, step: int, *, overwrite: bool, expected_bytes: int | None) -> str:
        """Begin the checkpoint of `step` and return its name. Deletes what killed saves have left below the URL.

        `expected_bytes` is not used: each host checks the space for its own files.
        """
        self._opened = time.perf_counter()
        self._remote.clean_up()
        return self._remote.begin(step, overwrite=overwrite)

    def folder(self, name: str, num_bytes: int) -> Path:
        """The folder for this host's files of a checkpoint. Raises CheckpointSpaceError if its disk is full."""
        part = self._part(name)
        part.mkdir(parents=True, exist_ok=True)
        check_space(part, num_bytes, estimate="this process's part")
        return part

    def deliver(self, name: str, entries: Mapping[str, FileEntry]) -> None:
        """Upload the files that this process wrote. Raises UploadError if the storage does not take them."""
        for file in entries:
            self._remote.put_file(self._part(name) / file, f"{name}/{file}")

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
        """Publish the checkpoint of `entries`, whose files are below the URL, then apply the retention."""
        part, text = self.folder(name, 0), state_to_json(state)
        written = write_state(part, text, models)
        if taken := set(written) & set(entries):
            raise CheckpointUsageError(
                "this name is the package's own", field="files", value=min(taken), remedy="use another file name"
            )
        own = describe_files({file: part / file for file in written})
        self.deliver(name, own)
        manifest = CheckpointManifest(
            step=step,
            files=dict(sorted({**entries, **own}.items())),
            metrics={metric: float(value) for metric, value in metrics.items()},
        )
        self._remote.publish(name, manifest, self._retention)
        # Nothing below may raise: the caller deletes what it could not publish.
        self._delete_parts(before=name)
        duration_s = time.perf_counter() - self._opened
        self._finished.append(Upload(name=f"step {step}", num_bytes=manifest.num_bytes, duration_s=duration_s))
        return Checkpoint(path=part, step=step, state=json.loads(text))

    def finish(self, name: str, step: int) -> Checkpoint:
        """The published checkpoint. Deletes this host's files of older ones."""
        self._delete_parts(before=name)
        state = self._remote.read_text(f"{name}/{STATE_NAME}")
        return Checkpoint(path=self._part(name), step=step, state=json.loads(state or "{}"))

    def abandon(self, name: str, step: int) -> None:
        """Delete what there is below the URL of a checkpoint that will not be published."""
        self.drop(name)
        self._remote.with_retry(None).delete_path(name)

    def drop(self, name: str) -> None:
        """Delete this host's files of a checkpoint that will not be published."""
        shutil.rmtree(self._part(name), ignore_errors=True)

    def cancel(self) -> None:
        """Repeat no more requests: this process ends with an error."""
        self._retry.limit()

    def take_finished(self) -> list[Upload]:
        """The checkpoints that this process published since the last call; seconds from `open` to the manifest."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def _part(self, name: str) -> Path:
        return self._root / f"{PART_PREFIX}{name}"

    def _delete_parts(self, *, before: str) -> None:
        for part in self._root.glob(f"{PART_PREFIX}*"):
            # Another process of this host may already write a newer one.
            if upload_time(part.name) < upload_time(before):
                shutil.rmtree(part, ignore_errors=True)
