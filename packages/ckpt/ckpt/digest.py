"""BLAKE3 checksums of files, computed on all cores while the files are written or read."""

import io
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from .threads import Pool, num_cores

#: Read, hashed or written at a time.
_BLOCK_BYTES = 4 << 20
#: Below this, handing work to threads costs more than the work.
_INLINE_BYTES = 1 << 20
#: Written between two requests to flush. By default Linux begins to write when a tenth of the memory is dirty.
_FLUSH_BYTES = 256 << 20
#: Blocks that wait to be hashed and written.
_MAX_PENDING = 8
_MAX_THREADS = 16


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size and checksum of one file, as the manifest holds them."""

    num_bytes: int
    checksum: str
    """BLAKE3 in hexadecimal, as `b3sum` prints it."""


def _new_hasher(num_bytes: int | None) -> blake3:
    # With threads of its own: the pool that AUTO shares does not survive a fork.
    is_small = num_bytes is not None and num_bytes <= _INLINE_BYTES
    return blake3(max_threads=1 if is_small else min(_MAX_THREADS, num_cores()))


def hash_files(paths: Sequence[Path], *, on_read: Callable[[int], None] | None = None) -> list[str | OSError]:
    """The checksum of each file, or the error that reading it raised.

    Reads several files at a time. `on_read` gets the bytes of each block that was hashed, from one thread at a time.
    """
    guard = threading.Lock()

    def report(num_bytes: int) -> None:
        if on_read is not None:
            with guard:
                on_read(num_bytes)

    with Pool(min(_MAX_THREADS, num_cores() + 2)) as pool:  # more than the cores: some wait for the disk
        return [checksum.result() for checksum in [pool.submit(_hash_file, path, report) for path in paths]]


def _hash_file(path: Path, report: Callable[[int], None]) -> str | OSError:
    try:
        with path.open("rb", buffering=0) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            hasher = _new_hasher(num_bytes)
            block = memoryview(bytearray(min(num_bytes, _BLOCK_BYTES)))
            while count := file.readinto(block):
                hasher.update(block[:count])
                report(count)
            return hasher.hexdigest()
    except OSError as error:
        return error


class HashedFile(io.RawIOBase):
    """A new file, written from beginning to end and hashed meanwhile; `entry` describes it once it is closed.

        with HashedFile(path) as file:
            torch.save(tree, file)
        file.entry

    Hashing, writing and flushing run in threads. When `close` returns, all bytes are on the disk.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = -1  # `close` also runs when the file cannot be opened
        self._has_failed = False
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._hasher = _new_hasher(None)
        # One thread each to hash and to write: both need the blocks in order.
        self._hashing, self._writing, self._flushing = Pool(1), Pool(1), Pool(1)
        self._pending: deque[tuple[Future[Any], Future[None]]] = deque()
        self._flushed: Future[None] | None = None
        self._num_bytes = self._num_unflushed = 0
        self.entry: FileEntry | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Write all of `data`, which may be reused afterwards. Raises OSError, also that of an earlier flush."""
        view = memoryview(data).cast("B")
        self.write_all([view])
        return view.nbytes

    def write_all(self, views: Iterable[memoryview]) -> None:
        """Write all views, which must not change before this returns.

        Producing the views (a copy from a device, say) overlaps with hashing and writing; 8 blocks of at most 4 MiB
        wait at a time. Raises OSError.
        """
        try:
            for view in views:
                for start in range(0, view.nbytes, _BLOCK_BYTES):
                    self._submit(view[start : start + _BLOCK_BYTES])
                    self._await_pending(_MAX_PENDING)
            self._await_pending(0)
        except BaseException:
            self._has_failed = True
            raise

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        if self._descriptor < 0:
            return
        try:
            if not self._has_failed:  # else its error is being raised
                os.fsync(self._descriptor)
                if self._flushed is not None:
                    self._flushed.result()
                self.entry = FileEntry(num_bytes=self._num_bytes, checksum=self._hasher.hexdigest())
        finally:
            for pool in (self._hashing, self._writing, self._flushing):
                with pool:
                    pass
            os.close(self._descriptor)

    def _submit(self, block: memoryview) -> None:
        self._num_bytes += block.nbytes
        if block.nbytes < _INLINE_BYTES and not self._pending:
            self._hasher.update(block)
            _write_block(self._descriptor, block)
        else:
            hashed = self._hashing.submit(self._hasher.update, block)
            self._pending.append((hashed, self._writing.submit(_write_block, self._descriptor, block)))
        self._num_unflushed += block.nbytes
        if self._num_unflushed >= _FLUSH_BYTES and (self._flushed is None or self._flushed.done()):
            if self._flushed is not None:
                self._flushed.result()
            self._flushed, self._num_unflushed = self._flushing.submit(os.fdatasync, self._descriptor), 0

    def _await_pending(self, most: int) -> None:
        """Wait until at most so many blocks are pending."""
        while len(self._pending) > most:
            for done in self._pending.popleft():
                done.result()


def _write_block(descriptor: int, block: memoryview) -> None:
    while block.nbytes:
        block = block[os.write(descriptor, block) :]
