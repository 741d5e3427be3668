"""Files below one fsspec URL: a folder, or an object store such as s3:// and gs://."""

import copy
import functools
import math
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import fsspec.core
from fsspec.implementations.local import LocalFileSystem

from ..errors import CheckpointStateError, CheckpointUsageError, UploadError
from ..manifest import MANIFEST_NAME

FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_Method = TypeVar("_Method", bound=Callable[..., Any])


class Retry:
    """Repeats failing requests after 1, 2, 4, ... seconds, at most a minute, for `retry_s` seconds of failed tries.

    `report` gets a line for each failure.
    """

    def __init__(self, report: Callable[[str], None], *, retry_s: float = math.inf) -> None:
        self.report, self._retry_s = report, retry_s
        self._limited_at = -math.inf
        self._pausing = threading.Condition()

    def limit(self, retry_s: float = 0.0) -> None:
        """Repeat failing requests for `retry_s` seconds from now on; one that pauses is repeated at once."""
        with self._pausing:
            self._retry_s, self._limited_at = retry_s, time.monotonic()
            self._pausing.notify_all()

    def __call__(self, action: str, request: Callable[[], Any]) -> Any:
        """The result of the request. Raises UploadError, with the storage's last error, when it gives up."""
        first_failure, pause = math.inf, FIRST_PAUSE_S
        while True:
            try:
                return request()
            except Exception as error:  # every storage has classes of its own
                problem, now = f"{action}: {storage_error(error)}", time.monotonic()
                first_failure = min(first_failure, now)
                is_late = now + pause > max(first_failure, self._limited_at) + self._retry_s
                if is_late or not threading.main_thread().is_alive():
                    raise UploadError(problem) from error
                self.report(f"{problem}; next try in {pause:.0f} s")
                with self._pausing:
                    self._pausing.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)


def _request(method: _Method) -> _Method:
    """Repeats the method as a whole if the storage has a Retry: a request whose answer was lost may have succeeded."""

    @functools.wraps(method)
    def call(self: "Storage", *args: Any) -> Any:
        if self.retry is None:
            return method(self, *args)
        path = next((arg for arg in args if isinstance(arg, str)), "")
        action = f"{self.url}: {method.__name__.replace('_', ' ')} {path}".rstrip()
        return self.retry(action, functools.partial(method, self, *args))

    return cast("_Method", call)


class Storage:
    """Files by their path below a URL. `fs` is fsspec's file system, `root` the path of the URL in it."""

    retry: Retry | None = None

    def __init__(self, url: str | Path, **storage_options: Any) -> None:
        """`storage_options` are passed to fsspec, a Path is a local folder. Raises CheckpointUsageError for the URL."""
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

    def with_retry(self, retry: Retry | None) -> Self:
        """The same storage, with failing requests repeated; None: not repeated."""
        other = copy.copy(self)
        other.retry = retry
        return other

    def check_writable(self) -> None:
        """Write and delete a small object; creates folders, but no bucket. Raises CheckpointUsageError with the reason.

        `makedirs` would create a bucket, and `exists` hides errors of the network.
        """
        top, probe = self.root.partition("/")[0] or "/", f".writable_{secrets.token_hex(4)}"
        try:
            self.fs.info(top)
            self.put_text(probe, "plinth")
            self.delete_path(probe)
        except Exception as error:  # every storage has classes of its own
            problem = f"cannot be written, or these credentials do not see {top}: {storage_error(error)}"
            raise CheckpointUsageError(problem, field="url", value=self.url) from error

    @_request
    def put_file(self, source: Path, path: str) -> None:
        """Upload a file. Raises CheckpointStateError when another number of bytes arrived."""
        target = f"{self.root}/{path}"
        self.fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
        self.fs.put_file(str(source), target)
        arrived, num_bytes = self.fs.info(target)["size"], source.stat().st_size
        if arrived != num_bytes:
            raise CheckpointStateError(f"{target}: {arrived} of {num_bytes} bytes arrived; the upload is not published")

    @_request
    def put_text(self, path: str, text: str) -> None:
        """Upload a small text, which appears as a whole."""
        # A file system shows a part of a file written in place; an object store copies a few kilobytes.
        folder, _, name = f"{self.root}/{path}".rpartition("/")
        self.fs.makedirs(folder, exist_ok=True)
        self.fs.pipe_file(f"{folder}/.{name}.partial", text.encode())
        self.fs.mv(f"{folder}/.{name}.partial", f"{folder}/{name}")
        self.fs.invalidate_cache()

    @_request
    def read_text(self, path: str) -> str | None:
        """A small text; None if there is none."""
        with suppress(FileNotFoundError):
            return bytes(self.fs.cat_file(f"{self.root}/{path}")).decode()
        return None

    @_request
    def exists(self, path: str) -> bool:
        """True if there is such a file."""
        self.fs.invalidate_cache()
        return bool(self.fs.exists(f"{self.root}/{path}"))

    @_request
    def get_file(self, path: str, target: Path) -> None:
        """Download a file."""
        self.fs.get_file(f"{self.root}/{path}", str(target))

    @_request
    def names(self, path: str = "") -> list[str]:
        """The names of files and folders directly in a folder, sorted; empty if there is no such folder."""
        self.fs.invalidate_cache()
        with suppress(FileNotFoundError):
            paths = self.fs.ls(f"{self.root}/{path}".rstrip("/"), detail=False)
            return sorted(each.rstrip("/").rpartition("/")[2] for each in paths)
        return []

    @_request
    def delete_path(self, path: str) -> None:
        """Delete a file or a folder, if it exists; a manifest first, so that readers never see half a checkpoint."""
        with suppress(FileNotFoundError):
            if self.fs.exists(f"{self.root}/{path}/{MANIFEST_NAME}"):
                self.fs.rm_file(f"{self.root}/{path}/{MANIFEST_NAME}")
            self.fs.rm(f"{self.root}/{path}", recursive=True)


def storage_error(error: Exception) -> str:
    """The class and the first lines of an error of a storage."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
