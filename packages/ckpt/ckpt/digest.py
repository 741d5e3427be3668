"""BLAKE3 checksums of files, computed on all cores while the files are written or read."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from blake3 import blake3

from .threads import Pool, num_cores

#: Hashed and written at a time.
_BLOCK_BYTES = 4 << 20
#: Below this, handing work to threads costs more than the work.
_INLINE_BYTES = 1 << 20
#: Written between two requests to flush. By default Linux begins to write when a tenth of the memory is dirty.
_FLUSH_BYTES = 256 << 20
_MAX_THREADS = 16


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size and checksum of one file, as the manifest holds them."""

    num_bytes: int
    checksum: str
    """BLAKE3 in hexadecimal, as `b3sum` prints it."""


def _new_hasher() -> Any:  # blake3's stub lacks what hashlib's protocol wants
    # With threads of its own: the pool that AUTO shares does not survive a fork.
    return blake3(max_threads=min(_MAX_THREADS, num_cores()))


def hash_files(paths: Sequence[Path]) -> list[str | OSError]:
    """The checksum of each file, or the error that reading it raised. Reads several files at a time."""
    with Pool(min(_MAX_THREADS, num_cores() + 2)) as pool:  # more than the cores: some wait for the disk
        return [checksum.result() for checksum in [pool.submit(_hash_file, path) for path in paths]]


def _hash_file(path: Path) -> str | OSError:
    try:
        with path.open("rb", buffering=0) as file:
            return hashlib.file_digest(file, _new_hasher).hexdigest()
    except OSError as error:
        return error


class HashedFile:
    """A new file, written from beginning to end and hashed meanwhile; `entry` describes it after the block.

        with HashedFile(path) as file:
            torch.save(tree, file)
        file.entry

    One thread hashes a block while it is written, another flushes. When the block ends without an error, all bytes are
    on the disk.
    """

    entry: FileEntry

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._hasher, self._pool = _new_hasher(), Pool(2)
        self._num_bytes = self._num_unflushed = 0
        self._flushed: Future[None] | None = None

    def write(self, data: Any) -> int:
        """Write all of `data`, which may be reused afterwards."""
        view = memoryview(data).cast("B")
        for start in range(0, view.nbytes, _BLOCK_BYTES):
            block = view[start : start + _BLOCK_BYTES]
            if block.nbytes < _INLINE_BYTES:
                self._hasher.update(block)
                self._write_block(block)
            else:
                hashed = self._pool.submit(self._hasher.update, block)
                try:
                    self._write_block(block)
                finally:
                    hashed.result()
                self._flush(block.nbytes)
        self._num_bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Does nothing, since nothing is buffered; torch.save calls it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file, self._pool:
            if error is None:
                if self._flushed is not None:
                    self._flushed.result()
                os.fsync(self._file.fileno())
                self.entry = FileEntry(num_bytes=self._num_bytes, checksum=self._hasher.hexdigest())

    def _flush(self, num_bytes: int) -> None:
        """Begin to flush what was written if that is much, without waiting for it."""
        self._num_unflushed += num_bytes
        if self._num_unflushed >= _FLUSH_BYTES and (self._flushed is None or self._flushed.done()):
            if self._flushed is not None:
                self._flushed.result()
            self._flushed, self._num_unflushed = self._pool.submit(os.fdatasync, self._file.fileno()), 0

    def _write_block(self, block: memoryview) -> None:
        while block.nbytes:
            block = block[self._file.write(block) :]
