"""Files below one fsspec URL: a folder, or an object store such as s3:// and gs://."""

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import fsspec.core
from fsspec.implementations.local import LocalFileSystem

from ..errors import CheckpointStateError, CheckpointUsageError, UploadError
from ..manifest import MANIFEST_NAME

_Result = TypeVar("_Result")


class Storage:
    """Files by their path below a URL. `fs` is fsspec's file system, `root` the path of the URL in it."""

    def __init__(self, url: str | Path, **storage_options: Any) -> None:
        """`storage_options` are passed to fsspec; a Path is a local folder.

        Raises CheckpointUsageError when fsspec does not support the URL.
        """
        self.url = str(url)
        self.fs: Any
        if isinstance(url, Path):
            self.fs, path = LocalFileSystem(), str(url.absolute())
        else:
            try:
                self.fs, path = fsspec.core.url_to_fs(url, **storage_options)
            except (ValueError, ImportError) as error:
                raise CheckpointUsageError(str(error), field="url", value=self.url) from error
        self.root = str(path).rstrip("/")

    def check_writable(self) -> None:
        """Write and delete a small object. Raises CheckpointUsageError with the storage's reason if that fails.

        Creates folders, but no bucket.
        """
        top, probe = self.root.partition("/")[0] or "/", f"{self.root}/.writable_{secrets.token_hex(4)}"
        try:
            try:
                self.fs.info(top)  # `makedirs` would create a bucket; `exists` hides errors of the network
            except FileNotFoundError:
                raise FileNotFoundError(f"{top} does not exist, or these credentials cannot see it") from None
            self.fs.makedirs(self.root, exist_ok=True)
            self.fs.pipe_file(probe, b"plinth")
            self.fs.rm_file(probe)
        except Exception as error:  # every storage has classes of its own
            problem = f"cannot be written: {storage_error(error)}"
            raise CheckpointUsageError(problem, field="url", value=self.url) from error

    def put_file(self, source: Path, path: str, num_bytes: int) -> None:
        """Upload a file of `num_bytes`. Raises CheckpointStateError when another number of bytes arrived."""
        target = f"{self.root}/{path}"
        self.fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
        self.fs.put_file(str(source), target)
        arrived = self.fs.info(target)["size"]
        if arrived != num_bytes:
            raise CheckpointStateError(f"{target}: {arrived} of {num_bytes} bytes arrived; the upload is not published")

    def put_text(self, path: str, text: str) -> None:
        """Upload a small text, which appears as a whole."""
        # On a file system, readers could see a part of a file written in place, so it is renamed. On an object store,
        # objects appear whole, and the move is a copy of a few kilobytes.
        folder, _, name = f"{self.root}/{path}".rpartition("/")
        self.fs.makedirs(folder, exist_ok=True)
        self.fs.pipe_file(f"{folder}/.{name}.partial", text.encode())
        self.fs.mv(f"{folder}/.{name}.partial", f"{folder}/{name}")
        self.fs.invalidate_cache()

    def read_text(self, path: str) -> str | None:
        """A small text; None if there is none."""
        try:
            return bytes(self.fs.cat_file(f"{self.root}/{path}")).decode()
        except FileNotFoundError:
            return None

    def exists(self, path: str) -> bool:
        """True if there is such a file."""
        return bool(self.fs.exists(f"{self.root}/{path}"))

    def folders(self) -> list[str]:
        """The names of the folders below the URL, in alphabetical order."""
        return sorted(_name(entry["name"]) for entry in self._list("", detail=True) if entry["type"] == "directory")

    def names(self, path: str) -> list[str]:
        """The names directly in a folder; empty if there is no such folder."""
        return [_name(entry) for entry in self._list(path, detail=False)]

    def delete_path(self, path: str) -> None:
        """Delete a file or a folder, if it exists; a manifest first, so that readers never see half a checkpoint."""
        with suppress(FileNotFoundError):
            if self.exists(f"{path}/{MANIFEST_NAME}"):
                self.fs.rm_file(f"{self.root}/{path}/{MANIFEST_NAME}")
            self.fs.rm(f"{self.root}/{path}", recursive=True)

    def _list(self, path: str, *, detail: bool) -> list[Any]:
        self.fs.invalidate_cache()
        try:
            return list(self.fs.ls(f"{self.root}/{path}".rstrip("/"), detail=detail))
        except FileNotFoundError:
            return []


class Retry:
    """Repeats a failing request to a storage as a whole: a request whose answer was lost may have succeeded.

    Args:
        url: named in messages.
        report: gets a line for each failure.
        stopped: ends the tries when it is set.
        retry_s: seconds after which it gives up.
        pause_s: seconds before the second try; doubled before each further one, at most `longest_pause_s`.
    """

    def __init__(
        self,
        url: str,
        report: Callable[[str], None],
        stopped: threading.Event,
        *,
        retry_s: float,
        pause_s: float,
        longest_pause_s: float,
    ) -> None:
        self._url, self._report, self._stopped = url, report, stopped
        self._retry_s, self._pause_s, self._longest_pause_s = retry_s, pause_s, longest_pause_s

    def __call__(self, action: str, request: Callable[[], _Result]) -> _Result:
        """The result of the request. Raises UploadError when it gives up or is stopped."""
        started, pause = time.monotonic(), self._pause_s
        while True:
            try:
                return request()
            except Exception as error:  # every storage has classes of its own
                problem = f"{self._url}: could not {action}: {storage_error(error)}"
                tried_s = time.monotonic() - started
                if tried_s + pause > self._retry_s or not threading.main_thread().is_alive():
                    raise UploadError(f"{problem}, in {tried_s:.0f} s of tries") from error
                self._report(f"{problem}; next try in {pause:.0f} s")
                if self._stopped.wait(pause):
                    raise UploadError(f"{problem}; it is not tried again, because this process ends") from error
                pause = min(2 * pause, self._longest_pause_s)


def storage_error(error: Exception) -> str:
    """The class and the first lines of an error of a storage."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]
