"""Uploads and downloads checkpoints to any fsspec storage (s3://, gs://, a shared folder), atomically.

    root/step_00000020.20261121T010203123456Z-5f3a/     one upload; its name is never reused
        actor/...  state.json                            the files, in any order
        manifest.json                                    uploaded last: it publishes the upload
    root/warm_start_model/                              a folder that does not change, uploaded once in the same way

Object stores have no atomic rename of folders, so the manifest publishes an upload. It is uploaded after all other
files have arrived with their sizes; readers ignore an upload without a manifest. No tensor is copied or moved on the
server, and a folder downloaded with any tool is a checkpoint as `CheckpointManager` publishes it.
"""

import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..errors import (
    CheckpointDamagedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointStateError,
    CheckpointUsageError,
    UnsupportedFormatError,
)
from ..files import check_space, fsync_file, new_folder
from ..manager import CheckpointManager
from ..manifest import MANIFEST_NAME, CheckpointManifest, ManifestError, check_files, folder_name, verify_folder
from ..reader import Checkpoint
from ..retention import Retention, steps_to_delete

#: Prefix of a folder with one host's files of an upload, see `HostCheckpoints`.
PART_PREFIX = ".part_"
_UPLOAD_FOLDER = re.compile(r"step_[0-9]{8,}\.[0-9]{8}T[0-9]{12}Z-[0-9a-f]+")


class RemoteCheckpoints:
    """The checkpoints below one URL. One process at a time uploads; any number may download.

    remote = RemoteCheckpoints("s3://bucket/run-7", key=..., secret=...)
    remote.upload(manager.publish(20, state=state))
    ...
    checkpoint = remote.download(remote.steps()[-1], Path("run/checkpoints"))
    """

    def __init__(self, url: str, **storage_options: Any) -> None:
        """`storage_options` are passed to fsspec. Raises CheckpointUsageError when fsspec does not support the URL."""
        try:
            fsspec: Any = import_module("fsspec.core")
        except ImportError as error:
            raise CheckpointUsageError("remote storage needs fsspec: install plinth-ckpt[remote]") from error
        self.url = url
        try:
            self._fs, path = fsspec.url_to_fs(url, **storage_options)
        except (ValueError, ImportError) as error:
            raise CheckpointUsageError(f"{url}: {error}") from error
        self._root = str(path).rstrip("/")
        self._metrics: dict[str, Mapping[str, float]] = {}

    def check_writable(self) -> None:
        """Write and delete a small object. Raises CheckpointUsageError with the storage's reason if that fails.

        Creates folders, but no bucket.
        """
        top, probe = self._root.partition("/")[0] or "/", f"{self._root}/.writable_{secrets.token_hex(4)}"
        try:
            try:
                self._fs.info(top)  # `makedirs` would create a bucket; `exists` hides errors of the network
            except FileNotFoundError:
                raise FileNotFoundError(f"{top} does not exist, or these credentials cannot see it") from None
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(probe, b"plinth")
            self._fs.rm_file(probe)
        except Exception as error:  # every storage has classes of its own
            raise CheckpointUsageError(f"{self.url}: cannot be written: {storage_error(error)}") from error

    def folders(self) -> list[str]:
        """The names of the folders below the URL, uploads included, in alphabetical order."""
        return sorted(name for name, is_file in self._children(self._root).items() if not is_file)

    def steps(self) -> list[int]:
        """The published steps, oldest first."""
        return sorted(self._uploads())

    def upload(
        self, checkpoint: Checkpoint, *, overwrite: bool = False, on_file: Callable[[int, int], None] | None = None
    ) -> str:
        """Upload a published checkpoint and return its URL path. When it returns, the upload is visible and whole.

        Verifies the checkpoint's files first. `on_file` gets the bytes of each uploaded file and the total bytes.
        Deletes unfinished uploads of the step; with `overwrite` also a whole one, after the new one is visible. After
        an error it tries to delete the uploaded files.

        Raises CheckpointExistsError, CheckpointDamagedError, or errors of the storage.
        """
        earlier = self._uploads().get(checkpoint.step)
        if earlier is not None and not overwrite:
            raise CheckpointExistsError(
                f"{self._root}/{earlier}: step {checkpoint.step} already exists. Pass overwrite=True to replace it."
            )
        _require_good(checkpoint.path, f"{checkpoint.path}: is damaged and is not uploaded", step=checkpoint.step)
        self.delete_all_but(checkpoint.step, keep=earlier)
        name = new_upload(checkpoint.step)
        try:
            manifest, text = CheckpointManifest.read(checkpoint.path), (checkpoint.path / MANIFEST_NAME).read_bytes()
            self._put_files(checkpoint.path, manifest, text, name, on_file)
        except BaseException:
            with suppress(Exception):  # the first error is raised; readers never see leftovers
                self._delete(name)
            raise
        self.delete_all_but(checkpoint.step, keep=name)
        return f"{self._root}/{name}"

    def download(
        self,
        step: int,
        root: Path,
        *,
        overwrite: bool = False,
        on_file: Callable[[int, int], None] | None = None,
        parts: Path | None = None,
    ) -> Checkpoint:
        """Download a step into the checkpoint folder `root`, verify it, and publish it there.

        `parts`: the folder of a `HostCheckpoints` on the same disk; the files that it has are linked, not downloaded.

        Raises CheckpointNotFoundError (with the published steps), CheckpointExistsError when `root` has the step
        (unless `overwrite`), CheckpointSpaceError, or CheckpointDamagedError when the download differs from the upload.
        """
        name = self._uploads().get(step)
        if name is None:
            known = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointNotFoundError(f"{self.url}: no checkpoint of step {step}; uploaded steps: {known}")
        manager = CheckpointManager(root)
        partial = manager.prepare(step, overwrite=overwrite, expected_bytes=0)
        try:
            part = None if parts is None else parts / f"{PART_PREFIX}{name}"
            self._get_files(f"{self._root}/{name}", partial, on_file, part)
            self._check_download(name, partial, step=step)
            return manager.adopt(step)
        finally:
            manager.abandon(step)
            manager.close()

    def fetch(self, step: int, root: Path, *, parts: Path | None = None) -> tuple[Checkpoint, int]:
        """The verified checkpoint of a step in the folder `root`, which keeps no other, and the bytes downloaded.

        Downloads nothing if `root` has it. `parts` and errors as in `download`.
        """
        name, num_bytes = self._uploads().get(step), 0
        manager = CheckpointManager(root, keep_last=1)
        here = manager.newest_good() if name is not None else None
        if here is None or here.step != step or here.verified != self._manifest_of(str(name)).sha256:

            def count(size: int, _: int) -> None:
                nonlocal num_bytes
                num_bytes += size

            self.download(step, root, overwrite=True, on_file=count, parts=parts)
            manager.discard_after(step)
            here = manager.load(step)
        manager.prune()
        manager.close()
        return here, num_bytes

    def upload_folder(self, folder: Path, name: str) -> int:
        """Upload a folder without links that does not change, as `name`, and return its bytes. Visible once whole.

        Does nothing and returns 0 if `name` is there. Raises CheckpointUsageError for links, or errors of the storage.
        """
        if self.has_folder(name):
            return 0
        created_at = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = CheckpointManifest.describe(folder, step=0, created_at=created_at)
        self._put_files(folder, manifest, manifest.to_json().encode(), name)
        return manifest.num_bytes

    def has_folder(self, name: str) -> bool:
        """Whether `upload_folder` has uploaded `name`."""
        self._fs.invalidate_cache()
        return bool(self._fs.exists(f"{self._root}/{name}/{MANIFEST_NAME}"))

    def download_folder(self, name: str, out: Path) -> None:
        """Download what `upload_folder` has uploaded as `name` to `out`, which must not exist, and verify it.

        `out` appears when it is whole. Raises CheckpointNotFoundError, CheckpointSpaceError, or CheckpointDamagedError
        when the download differs from the upload.
        """
        if not self.has_folder(name):
            raise CheckpointNotFoundError(f"{self.url}: there is no folder {name}, or it was not uploaded to its end")
        with new_folder(out) as partial:
            self._get_files(f"{self._root}/{name}", partial, None)
            self._check_download(name, partial)

    def prune(self, retention: Retention, *, keep: int) -> list[int]:
        """Delete the steps that `retention` does not keep, except `keep`. Returns the deleted steps, oldest first."""
        uploads = self._uploads()
        ranks_by_metric = retention.keep_best is not None
        metrics = {step: self._metrics_of(name) for step, name in uploads.items()} if ranks_by_metric else {}
        deleted = steps_to_delete(uploads, metrics, retention, keep=keep)
        for step in deleted:
            self.delete(step)
        return deleted

    def delete(self, step: int) -> None:
        """Delete a step. Its manifest is deleted first, so readers never see a part of it."""
        self.delete_all_but(step, keep=None)

    def clean_up(self) -> list[str]:
        """Delete all unfinished uploads and return their names. Do not call it while another process uploads."""
        whole = set(self._uploads().values())
        unfinished = [name for name in self._folders() if name not in whole]
        for name in unfinished:
            self._delete(name)
        return unfinished

    def _folders(self) -> list[str]:
        """The uploads, finished or not."""
        return [name for name in self.folders() if _UPLOAD_FOLDER.fullmatch(name)]

    def _uploads(self) -> dict[int, str]:
        """The newest whole upload of each step. Names sort by time."""
        found = [name for name in self._folders() if self._fs.exists(f"{self._root}/{name}/{MANIFEST_NAME}")]
        return {_step_of(name): name for name in found}

    def _metrics_of(self, name: str) -> Mapping[str, float]:
        """The metrics in the manifest of an upload, read once; none if it is damaged."""
        if name not in self._metrics:
            try:
                self._metrics[name] = self._manifest_of(name).metrics
            except (CheckpointDamagedError, UnsupportedFormatError):
                self._metrics[name] = {}
        return self._metrics[name]

    def _manifest_of(self, name: str) -> CheckpointManifest:
        with TemporaryDirectory() as folder:
            return self._get_manifest(f"{self._root}/{name}", Path(folder))

    # Files of one upload, by paths below the URL

    def put_file(self, source: Path, path: str, num_bytes: int) -> None:
        """Upload a file of `num_bytes`. Raises CheckpointStateError when another number of bytes arrived."""
        target = f"{self._root}/{path}"
        self._fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
        self._fs.put_file(str(source), target)
        arrived = self._fs.info(target)["size"]
        if arrived != num_bytes:
            raise CheckpointStateError(f"{target}: {arrived} of {num_bytes} bytes arrived; the upload is not published")

    def put_text(self, path: str, text: bytes) -> None:
        """Upload a small text, which appears as a whole."""
        # On a file system, readers could see a part of a file written in place, so it is renamed. On an object store,
        # objects appear whole, and the move is a copy of a few kilobytes.
        folder, _, name = f"{self._root}/{path}".rpartition("/")
        self._fs.makedirs(folder, exist_ok=True)
        self._fs.pipe_file(f"{folder}/.{name}.partial", text)
        self._fs.mv(f"{folder}/.{name}.partial", f"{folder}/{name}")
        self._fs.invalidate_cache()

    def read_text(self, path: str) -> bytes | None:
        """A small text; None if there is none."""
        try:
            return bytes(self._fs.cat_file(f"{self._root}/{path}"))
        except FileNotFoundError:
            return None

    def list_files(self, path: str) -> list[str]:
        """The names of the files directly in a folder; empty if there is none."""
        return [name for name, is_file in self._children(f"{self._root}/{path}").items() if is_file]

    def _children(self, folder: str) -> dict[str, bool]:
        """The names directly in a folder, and whether each is a file; empty if there is no such folder."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(folder, detail=True)
        except FileNotFoundError:
            return {}
        return {str(each["name"]).rstrip("/").rsplit("/", 1)[-1]: each["type"] == "file" for each in found}

    def delete_path(self, path: str) -> None:
        """Delete a file or a folder; does nothing if there is none."""
        with suppress(FileNotFoundError):
            self._fs.rm(f"{self._root}/{path}", recursive=True)

    def publish(self, name: str, manifest: CheckpointManifest) -> None:
        """Make an upload visible that `new_upload` named, after all files of its manifest were put."""
        self.put_text(f"{name}/{MANIFEST_NAME}", manifest.to_json().encode())

    def discard(self, name: str) -> None:
        """Delete an upload, or the part of it that exists; its manifest first."""
        with suppress(FileNotFoundError):
            self._delete(name)

    def _put_files(
        self,
        source: Path,
        manifest: CheckpointManifest,
        text: bytes,
        target: str,
        on_file: Callable[[int, int], None] | None = None,
    ) -> None:
        """Upload the files of `manifest`, then its `text`."""
        for name, entry in manifest.files.items():
            self.put_file(source / name, f"{target}/{name}", entry.num_bytes)
            if on_file is not None:
                on_file(entry.num_bytes, manifest.num_bytes)
        self.put_text(f"{target}/{MANIFEST_NAME}", text)

    def _get_manifest(self, source: str, target: Path) -> CheckpointManifest:
        self._fs.get_file(f"{source}/{MANIFEST_NAME}", str(target / MANIFEST_NAME))
        try:
            return CheckpointManifest.read(target)
        except ManifestError as error:
            raise CheckpointDamagedError(f"{source}/{MANIFEST_NAME}: {error}", files=(MANIFEST_NAME,)) from None

    def _get_files(
        self, source: str, target: Path, on_file: Callable[[int, int], None] | None, part: Path | None = None
    ) -> None:
        """Download the files that `part` does not have as they are in the manifest."""
        manifest = self._get_manifest(source, target)
        check_space(target.parent, manifest.num_bytes, estimate="the size of the upload")
        for name, entry in manifest.files.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            if part is not None and not check_files(part, manifest, [name]):
                _link(part / name, target / name)
                continue
            self._fs.get_file(f"{source}/{name}", str(target / name))
            fsync_file(target / name)
            if on_file is not None:
                on_file(entry.num_bytes, manifest.num_bytes)
        fsync_file(target / MANIFEST_NAME)

    def _check_download(self, name: str, folder: Path, *, step: int | None = None) -> None:
        _require_good(folder, f"{self._root}/{name}: the download is damaged", step=step)

    def delete_all_but(self, step: int, *, keep: str | None) -> None:
        """Delete all uploads of a step except `keep`, finished or not."""
        for name in self._folders():
            if _step_of(name) == step and name != keep:
                self._delete(name)

    def _delete(self, name: str) -> None:
        manifest = f"{self._root}/{name}/{MANIFEST_NAME}"
        if self._fs.exists(manifest):
            self._fs.rm_file(manifest)
        self._fs.rm(f"{self._root}/{name}", recursive=True)


def new_upload(step: int) -> str:
    """A new name for an upload of a step; names sort by time."""
    return f"{folder_name(step)}.{datetime.now(UTC).strftime('%Y%m%dT%H%M%S%fZ')}-{secrets.token_hex(2)}"


def _step_of(name: str) -> int:
    return int(name.partition(".")[0].removeprefix("step_"))


def upload_time(name: str) -> str:
    """The part of an upload's name that says when it began; compares by time."""
    return name.rpartition(".")[2]


def _link(source: Path, target: Path) -> None:
    """Link a file that is never changed, or copy it to another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        fsync_file(target)


def _require_good(folder: Path, what: str, *, step: int | None) -> None:
    """Raise CheckpointDamagedError, which says `what`, unless all files are as in the manifest."""
    if problems := verify_folder(folder):
        files = tuple(problem.file for problem in problems)
        raise CheckpointDamagedError(f"{what}: {'; '.join(map(str, problems[:5]))}", step=step, files=files)


def storage_error(error: Exception) -> str:
    """The class and the first lines of an error of a storage."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
