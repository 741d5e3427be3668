"""Uploads and downloads checkpoints to any fsspec storage (s3://, gs://, a shared folder), atomically.

    root/step_00000020.20261121T010203123456Z-5f3a/     one upload; its name is never reused
        actor/...  state.json                            the files, in any order
        manifest.json                                    uploaded last: it publishes the upload
    root/warm_start_model/                              a folder that does not change, uploaded once in the same way

Object stores have no atomic rename of folders, so the manifest publishes an upload. It is uploaded after all other
files have arrived with their sizes; readers ignore an upload without a manifest. No tensor is copied or moved on the
server, and a folder downloaded with any tool is a checkpoint as `CheckpointManager` publishes it.
"""

import logging
import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path

from plinth_base.errors import listed

from ..errors import CheckpointDamagedError, CheckpointExistsError, CheckpointNotFoundError, UnsupportedFormatError
from ..files import check_space, fsync_file, new_folder, write_text
from ..manager import CheckpointManager
from ..manifest import MANIFEST_NAME, CheckpointManifest, ManifestError, check_files, folder_name, verify_folder
from ..reader import Checkpoint
from ..retention import Retention, steps_to_delete
from .storage import Storage, storage_error

_log = logging.getLogger("ckpt")
#: Prefix of a folder with one host's files of an upload, see `HostCheckpoints`.
PART_PREFIX = ".part_"
_UPLOAD_FOLDER = re.compile(r"step_[0-9]{8,}\.[0-9]{8}T[0-9]{12}Z-[0-9a-f]+")


class RemoteCheckpoints(Storage):
    """The checkpoints below one URL. One process at a time uploads; any number may download.

    remote = RemoteCheckpoints("s3://bucket/run-7", key=..., secret=...)
    remote.upload(manager.publish(20, state=state))
    ...
    checkpoint = remote.download(remote.steps()[-1], Path("run/checkpoints"))
    """

    def steps(self) -> list[int]:
        """The published steps, oldest first."""
        return sorted(self._published())

    def begin(self, step: int, *, overwrite: bool) -> str:
        """A new name for an upload of `step`; names sort by time. Deletes unfinished uploads of the step.

        Raises CheckpointExistsError when the step is published, unless `overwrite`.
        """
        earlier = self._published().get(step)
        if earlier is not None and not overwrite:
            problem = f"{self.root}/{earlier} exists"
            raise CheckpointExistsError(problem, field="step", value=step, remedy="pass overwrite=True to replace it")
        self.delete(step, keep=earlier)
        return f"{folder_name(step)}.{datetime.now(UTC).strftime('%Y%m%dT%H%M%S%fZ')}-{secrets.token_hex(2)}"

    def publish(self, name: str, manifest: CheckpointManifest, retention: Retention | None = None) -> None:
        """Make an upload visible that `begin` named, after all files of its manifest were put.

        Then deletes other uploads of its step, and the steps that `retention` drops; a failure to do so is logged.
        """
        self.put_text(f"{name}/{MANIFEST_NAME}", manifest.to_json())
        once = self.with_retry(None)  # what stays is deleted after the next upload
        try:
            once.delete(manifest.step, keep=name)
            once._prune(retention or Retention(), keep=manifest.step)
        except Exception as error:  # every storage has classes of its own
            report = _log.warning if self.retry is None else self.retry.report
            report(f"{self.url}: old uploads could not be deleted: {storage_error(error)}")

    def upload(self, checkpoint: Checkpoint, *, overwrite: bool = False, retention: Retention | None = None) -> str:
        """Upload a published checkpoint and return its URL path. When it returns, the upload is visible and whole.

        Verifies the checkpoint's files first. Deletes unfinished uploads of the step; with `overwrite` also a whole
        one, after the new one is visible, and the steps that `retention` drops. After an error it tries to delete the
        uploaded files.

        Raises CheckpointExistsError, CheckpointDamagedError, or errors of the storage.
        """
        name = self.begin(checkpoint.step, overwrite=overwrite)
        problem = f"{checkpoint.path}: is damaged and is not uploaded"
        _require_good(checkpoint.path, problem, step=checkpoint.step)
        try:
            manifest = CheckpointManifest.read(checkpoint.path)
            self._put_files(checkpoint.path, manifest, name)
            self.publish(name, manifest, retention)
        except BaseException:
            with suppress(Exception):  # the first error is raised; readers never see leftovers
                self.with_retry(None).delete_path(name)
            raise
        return f"{self.root}/{name}"

    def download(
        self,
        step: int,
        root: Path,
        *,
        overwrite: bool = False,
        parts: Path | None = None,
        on_file: Callable[[int], object] = lambda num_bytes: None,
    ) -> Checkpoint:
        """Download a step into the checkpoint folder `root`, verify it, and publish it there.

        Downloads nothing if `root` has this checkpoint whole. `parts`: the folder of a `HostCheckpoints` on the same
        disk; the files that it has are linked, not downloaded. `on_file` gets the bytes of each file downloaded.

        Raises CheckpointNotFoundError (with the published steps), CheckpointExistsError when `root` has another
        checkpoint of the step (unless `overwrite`), CheckpointSpaceError, or CheckpointDamagedError when the download
        differs from the upload.
        """
        published = self._published()
        if step not in published:
            known = ", ".join(map(str, sorted(published))) or "no step is uploaded"
            raise CheckpointNotFoundError(f"no such checkpoint in {self.url}", field="step", value=step, allowed=known)
        name = published[step]
        manifest, part = self._manifest_of(name), None if parts is None else parts / f"{PART_PREFIX}{name}"
        with closing(CheckpointManager(root)) as manager:
            with suppress(CheckpointNotFoundError, CheckpointDamagedError, UnsupportedFormatError):
                here = manager.load(step)
                if here.verified == manifest.checksum:
                    return here
            partial = manager.prepare(step, overwrite=overwrite, expected_bytes=0)
            try:
                self._get_files(name, manifest, partial, part, on_file)
                return manager.adopt(step)
            finally:
                manager.abandon(step)

    def upload_folder(self, folder: Path, name: str) -> int:
        """Upload a folder without links that does not change, as `name`, and return its bytes. Visible once whole.

        Does nothing and returns 0 if `name` is there. Raises CheckpointUsageError for links, or errors of the storage.
        """
        if self.has_folder(name):
            return 0
        manifest = CheckpointManifest.describe(folder, step=0)
        self._put_files(folder, manifest, name)
        self.put_text(f"{name}/{MANIFEST_NAME}", manifest.to_json())
        return manifest.num_bytes

    def has_folder(self, name: str) -> bool:
        """True if `upload_folder` has uploaded `name` as a whole."""
        return self.exists(f"{name}/{MANIFEST_NAME}")

    def download_folder(self, name: str, out: Path) -> None:
        """Download what `upload_folder` has uploaded as `name` to `out`, which must not exist, and verify it.

        `out` appears when it is whole. Raises CheckpointNotFoundError, CheckpointSpaceError, or CheckpointDamagedError
        when the download differs from the upload.
        """
        if not self.has_folder(name):
            problem = f"no such folder in {self.url}, or it was not uploaded to its end"
            raise CheckpointNotFoundError(problem, field="name", value=name)
        with new_folder(out) as partial:
            self._get_files(name, self._manifest_of(name), partial)

    def delete(self, step: int, *, keep: str | None = None) -> None:
        """Delete all uploads of a step, finished or not, except the one named `keep`."""
        for name in self._uploads():
            if _step_of(name) == step and name != keep:
                self.delete_path(name)

    def clean_up(self) -> None:
        """Delete all unfinished uploads. Do not call it while another process uploads."""
        for name in set(self._uploads()) - set(self._published().values()):
            self.delete_path(name)

    def _prune(self, retention: Retention, *, keep: int) -> None:
        """Delete the steps that `retention` does not keep, except `keep`."""
        published = self._published()

        def metrics(step: int) -> Mapping[str, float]:
            with suppress(CheckpointDamagedError, UnsupportedFormatError):
                return self._manifest_of(published[step]).metrics
            return {}  # it never counts as best

        for step in steps_to_delete(published, metrics, retention, keep=keep):
            self.delete(step)

    def _uploads(self) -> list[str]:
        """The uploads, finished or not. Names sort by time."""
        return [name for name in self.names() if _UPLOAD_FOLDER.fullmatch(name)]

    def _published(self) -> dict[int, str]:
        """The newest whole upload of each step."""
        return {_step_of(name): name for name in self._uploads() if self.has_folder(name)}

    def _manifest_of(self, name: str) -> CheckpointManifest:
        source = f"{self.root}/{name}"
        try:
            return CheckpointManifest.parse(self.read_text(f"{name}/{MANIFEST_NAME}") or "", source=source)
        except (ManifestError, UnicodeDecodeError) as error:
            raise CheckpointDamagedError(f"{source}/{MANIFEST_NAME}: {error}", files=(MANIFEST_NAME,)) from None

    def _put_files(self, source: Path, manifest: CheckpointManifest, name: str) -> None:
        for file in manifest.files:
            self.put_file(source / file, f"{name}/{file}")

    def _get_files(
        self,
        name: str,
        manifest: CheckpointManifest,
        target: Path,
        part: Path | None = None,
        on_file: Callable[[int], object] = lambda num_bytes: None,
    ) -> None:
        """Download the files that `part` does not have as they are in the manifest, and verify all."""
        check_space(target.parent, manifest.num_bytes, estimate="the size of the upload")
        for file, entry in manifest.files.items():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            if part is None or not _link(part, target, manifest, file):
                self.get_file(f"{name}/{file}", target / file)
                fsync_file(target / file)
                on_file(entry.num_bytes)
        write_text(target / MANIFEST_NAME, manifest.to_json())
        _require_good(target, f"{self.root}/{name}: the download is damaged", step=manifest.step)


def _step_of(name: str) -> int:
    return int(name.partition(".")[0].removeprefix("step_"))


def upload_time(name: str) -> str:
    """The part of an upload's name that says when it began; compares by time."""
    return name.rpartition(".")[2]


def _link(source: Path, target: Path, manifest: CheckpointManifest, file: str) -> bool:
    """Link a file of `source`, which never changes, if it is as in the manifest and on the same disk."""
    if check_files(source, manifest, [file]):
        return False
    with suppress(OSError):
        os.link(source / file, target / file)
        return True
    return False


def _require_good(folder: Path, problem: str, *, step: int | None) -> None:
    """Raise CheckpointDamagedError, whose message begins with `problem`, unless all files are as in the manifest."""
    if damaged := verify_folder(folder):
        files = tuple(each.file for each in damaged)
        raise CheckpointDamagedError(f"{problem}: {listed(damaged, separator='; ')}", step=step, files=files)
