"""Uploads and downloads checkpoints to any fsspec storage (s3://, gs://, a shared folder), atomically.

    root/step_00000020.20261121T010203123456Z-5f3a/     one upload; its name is never reused
        actor/...  state.json                            the files, in any order
        manifest.json                                    uploaded last: it publishes the upload

Object stores have no atomic rename of folders, so the manifest publishes an upload. It is uploaded after all other
files have arrived with their sizes; readers ignore an upload without a manifest. No tensor is copied or moved on the
server, and a folder downloaded with any tool is a checkpoint as `CheckpointManager` publishes it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import (
    CheckpointDamagedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointStateError,
    CheckpointUsageError,
)
from ..files import check_space, fsync_file
from ..manager import CheckpointManager
from ..manifest import MANIFEST_NAME, CheckpointManifest, ManifestError, folder_name, verify_folder
from ..reader import Checkpoint

_UPLOAD_FOLDER = re.compile(r"step_([0-9]{8,})\.([0-9]{8}T[0-9]{12}Z-[0-9a-f]+)")


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
        problems = verify_folder(checkpoint.path)
        if problems:
            raise CheckpointDamagedError(
                f"{checkpoint.path}: is damaged and is not uploaded: {'; '.join(map(str, problems[:5]))}",
                step=checkpoint.step,
                files=tuple(problem.file for problem in problems),
            )
        self._delete_all_but(checkpoint.step, keep=earlier)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
        name = f"{folder_name(checkpoint.step)}.{stamp}-{secrets.token_hex(2)}"
        try:
            self._put_files(checkpoint.path, f"{self._root}/{name}", on_file)
        except BaseException:
            self._try_to_delete(name)
            raise
        self._delete_all_but(checkpoint.step, keep=name)
        return f"{self._root}/{name}"

    def download(
        self, step: int, root: Path, *, overwrite: bool = False, on_file: Callable[[int, int], None] | None = None
    ) -> Checkpoint:
        """Download a step into the checkpoint folder `root`, verify it, and publish it there.

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
            self._get_files(f"{self._root}/{name}", partial, on_file)
            problems = verify_folder(partial)
            if problems:
                raise CheckpointDamagedError(
                    f"{self._root}/{name}: the download is damaged: {'; '.join(map(str, problems[:5]))}",
                    step=step,
                    files=tuple(problem.file for problem in problems),
                )
            return manager.adopt(step)
        finally:
            manager.abandon(step)
            manager.close()

    def delete(self, step: int) -> None:
        """Delete a step. Its manifest is deleted first, so readers never see a part of it."""
        self._delete_all_but(step, keep=None)

    def clean_up(self) -> list[str]:
        """Delete all unfinished uploads and return their names. Do not call it while another process uploads."""
        whole = set(self._uploads().values())
        unfinished = [name for name in self._folders() if name not in whole]
        for name in unfinished:
            self._delete(name)
        return unfinished

    def _folders(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        names = [str(path).rstrip("/").rsplit("/", 1)[-1] for path in found]
        return sorted(name for name in names if _UPLOAD_FOLDER.fullmatch(name))

    def _uploads(self) -> dict[int, str]:
        """The newest whole upload of each step. Names sort by time."""
        whole = {}
        for name in self._folders():
            match = _UPLOAD_FOLDER.fullmatch(name)
            if match and self._fs.exists(f"{self._root}/{name}/{MANIFEST_NAME}"):
                whole[int(match[1])] = name
        return whole

    def _put_files(self, source: Path, target: str, on_file: Callable[[int, int], None] | None) -> None:
        manifest = CheckpointManifest.read(source)
        for name, entry in manifest.files.items():
            self._fs.makedirs(f"{target}/{name}".rsplit("/", 1)[0], exist_ok=True)
            self._fs.put_file(str(source / name), f"{target}/{name}")
            arrived = self._fs.info(f"{target}/{name}")["size"]
            if arrived != entry.num_bytes:
                raise CheckpointStateError(
                    f"{target}/{name}: {arrived} of {entry.num_bytes} bytes arrived; the upload is not published"
                )
            if on_file is not None:
                on_file(entry.num_bytes, manifest.num_bytes)
        # On a file system, readers could see a part of a manifest written in place, so it is renamed. On an object
        # store, objects appear whole, and the move is a copy of a few kilobytes.
        self._fs.put_file(str(source / MANIFEST_NAME), f"{target}/.{MANIFEST_NAME}.partial")
        self._fs.mv(f"{target}/.{MANIFEST_NAME}.partial", f"{target}/{MANIFEST_NAME}")
        self._fs.invalidate_cache()

    def _get_files(self, source: str, target: Path, on_file: Callable[[int, int], None] | None) -> None:
        self._fs.get_file(f"{source}/{MANIFEST_NAME}", str(target / MANIFEST_NAME))
        try:
            manifest = CheckpointManifest.read(target)
        except ManifestError as error:
            raise CheckpointDamagedError(f"{source}/{MANIFEST_NAME}: {error}", files=(MANIFEST_NAME,)) from None
        check_space(target.parent, manifest.num_bytes, estimate="the size of the upload")
        for name, entry in manifest.files.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            self._fs.get_file(f"{source}/{name}", str(target / name))
            fsync_file(target / name)
            if on_file is not None:
                on_file(entry.num_bytes, manifest.num_bytes)
        fsync_file(target / MANIFEST_NAME)

    def _delete_all_but(self, step: int, *, keep: str | None) -> None:
        for name in self._folders():
            match = _UPLOAD_FOLDER.fullmatch(name)
            if match and int(match[1]) == step and name != keep:
                self._delete(name)

    def _delete(self, name: str) -> None:
        manifest = f"{self._root}/{name}/{MANIFEST_NAME}"
        if self._fs.exists(manifest):
            self._fs.rm_file(manifest)
        self._fs.rm(f"{self._root}/{name}", recursive=True)

    def _try_to_delete(self, name: str) -> None:
        try:
            self._delete(name)
        except Exception:  # the first error is raised; readers never see leftovers
            return
