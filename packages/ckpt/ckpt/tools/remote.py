"""Checkpoints on any storage fsspec reaches (s3://, gs://, a shared folder): a copy is visible when it is whole.

    root/step_00000020.20261121T010203123456Z-5f3a/     one upload; the name is never used again
        actor/...  state.json                            the files, in any order
        manifest.json                                    last: the upload exists from this moment

Object stores have no rename and no folders, so the manifest is what publishes: it goes up after every other file has
arrived with its size, and a name without one is an upload under way or a dead one, which no reader sees. No tensor is
copied or moved on the server, and the folder fetched by any tool is a checkpoint as `CheckpointManager` publishes it.
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
from ..manifest import MANIFEST_NAME, CheckpointManifest, ManifestError, verify_folder
from ..reader import Checkpoint, folder_name

__all__ = ["RemoteCheckpoints"]

_UPLOAD_FOLDER = re.compile(r"step_([0-9]{8,})\.([0-9]{8}T[0-9]{12}Z-[0-9a-f]+)")


class RemoteCheckpoints:
    """The checkpoints below one URL. One process at a time uploads; any number may download.

    remote = RemoteCheckpoints("s3://bucket/run-7", key=..., secret=...)
    remote.upload(manager.publish(20, state=state))
    ...
    checkpoint = remote.download(remote.steps()[-1], Path("run/checkpoints"))
    """

    def __init__(self, url: str, **storage_options: Any) -> None:
        """`storage_options` go to fsspec. Raises CheckpointUsageError when fsspec does not know the URL's kind."""
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
        """The steps that were uploaded whole, oldest first."""
        return sorted(self._uploads())

    def upload(
        self, checkpoint: Checkpoint, *, overwrite: bool = False, on_file: Callable[[int, int], None] | None = None
    ) -> str:
        """Copy a published checkpoint there and return its URL path; when it returns, the copy is visible and whole.

        The checkpoint's files are verified first. `on_file` is told the bytes of each file that has gone up and of all.
        Deletes what earlier uploads of the step left; with `overwrite` an earlier whole one, after the new one is
        visible. On an error what went up is deleted, as far as the storage still answers.

        Raises CheckpointExistsError, CheckpointDamagedError, or what the storage raises.
        """
        earlier = self._uploads().get(checkpoint.step)
        if earlier is not None and not overwrite:
            raise CheckpointExistsError(
                f"{self._root}/{earlier}: step {checkpoint.step} is there already. Pass overwrite=True to replace it."
            )
        problems = verify_folder(checkpoint.path)
        if problems:
            raise CheckpointDamagedError(
                f"{checkpoint.path}: is damaged, so it is not uploaded: {'; '.join(map(str, problems[:5]))}",
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
        """Fetch a step into the folder of checkpoints `root`, verify it, and publish it there.

        Raises CheckpointNotFoundError (naming the steps there are), CheckpointExistsError when `root` has the step
        (unless `overwrite`), CheckpointSpaceError, CheckpointDamagedError when what arrived is not what was uploaded.
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
                    f"{self._root}/{name}: what arrived is damaged: {'; '.join(map(str, problems[:5]))}",
                    step=step,
                    files=tuple(problem.file for problem in problems),
                )
            return manager.adopt(step)
        finally:
            manager.abandon(step)
            manager.close()

    def delete(self, step: int) -> None:
        """Delete a step; its manifest goes first, so that no reader finds a part of it."""
        self._delete_all_but(step, keep=None)

    def clean_up(self) -> list[str]:
        """Delete every upload that was not finished; return their names. Not while another process uploads."""
        whole = set(self._uploads().values())
        doomed = [name for name in self._folders() if name not in whole]
        for name in doomed:
            self._delete(name)
        return doomed

    # Inside

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
                    f"{target}/{name}: {arrived} bytes arrived of {entry.num_bytes}; the upload is not published"
                )
            if on_file is not None:
                on_file(entry.num_bytes, manifest.num_bytes)
        # On a store of files, a manifest written in place would be seen half: there it is renamed. On a store of
        # objects, one appears whole, and the move is a copy of a few kilobytes.
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
        except Exception:  # the first error is the one to tell; readers never see what stays
            return
