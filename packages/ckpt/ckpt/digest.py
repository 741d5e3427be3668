"""BLAKE3 checksums of files, computed on all cores while the files are written or read.

Manifests of formats 1 and 2 hold SHA-256 instead. Those are verified here and no longer written: in format 1 the plain
SHA-256 of a file, in format 2 the SHA-256 of the SHA-256 digests of its chunks, for a file of more than one chunk.
"""

import hashlib
import io
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Literal, Protocol

from blake3 import blake3

from .threads import Pool, num_cores

Algorithm = Literal["blake3", "sha256"]
#: Read or handed to a thread at a time.
_BLOCK_BYTES = 4 << 20
#: Below this, handing work to threads costs more than the work.
_INLINE_BYTES = 1 << 20
#: Written between two requests to flush. By default Linux begins to write when a tenth of the memory is dirty.
_FLUSH_BYTES = 256 << 20
#: Blocks that wait to be hashed and written.
_MAX_PENDING = 8
_MAX_THREADS = 16
#: Buffers of one writev; Linux allows 1024.
_MAX_BUFFERS = 512


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size and checksum of one file, as the manifest holds them."""

    num_bytes: int
    checksum: str
    """BLAKE3 in hexadecimal, as `b3sum` prints it; SHA-256 in the manifests of formats 1 and 2."""


class _Hasher(Protocol):
    def update(self, data: memoryview, /) -> Any: ...
    def hexdigest(self) -> str: ...


class _ChunkedSha256:
    """The checksum of format 2."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = self._room = chunk_bytes
        self._chunk = hashlib.sha256()
        self._digests: list[bytes] = []

    def update(self, data: memoryview) -> None:
        while data.nbytes:
            piece, data = data[: self._room], data[self._room :]
            self._chunk.update(piece)
            self._room -= piece.nbytes
            if not self._room:
                self._digests.append(self._chunk.digest())
                self._chunk, self._room = hashlib.sha256(), self._chunk_bytes

    def hexdigest(self) -> str:
        is_open = self._room < self._chunk_bytes or not self._digests
        digests = [*self._digests, self._chunk.digest()] if is_open else self._digests
        return digests[0].hex() if len(digests) == 1 else hashlib.sha256(b"".join(digests)).hexdigest()


def _blake3(num_bytes: int | None) -> _Hasher:
    # With threads of its own: the pool that AUTO shares does not survive a fork.
    is_small = num_bytes is not None and num_bytes <= _INLINE_BYTES
    return blake3(max_threads=1 if is_small else min(_MAX_THREADS, num_cores()))


def hash_files(
    files: Sequence[tuple[Path, int]],
    *,
    algorithm: Algorithm = "blake3",
    chunk_bytes: int | None = None,
    on_read: Callable[[int], None] | None = None,
) -> list[str | OSError]:
    """The checksum of each file, given with its size in bytes, or the error that reading it raised.

    `chunk_bytes`: the chunk size of SHA-256 in format 2. `on_read` gets the bytes of each block that was hashed.
    """
    checksums: list[str | OSError] = []
    for index, blocks in groupby(_read_blocks(files), key=lambda block: block[0]):
        failed: OSError | None = None
        hasher: _Hasher
        if algorithm == "blake3":
            hasher = _blake3(files[index][1])
        else:
            hasher = hashlib.sha256() if chunk_bytes is None else _ChunkedSha256(chunk_bytes)
        for _, data in blocks:
            if isinstance(data, OSError):
                failed = failed or data
                continue
            hasher.update(data)
            if on_read is not None:
                on_read(data.nbytes)
        checksums.append(failed or hasher.hexdigest())
    return checksums


def _read_blocks(files: Sequence[tuple[Path, int]]) -> Iterator[tuple[int, memoryview | OSError]]:
    """(index of the file, bytes) of every block in order; threads read ahead. A view is valid until the next one.

    An empty file is one empty block.
    """
    ranges = (
        (index, start, min(start + _BLOCK_BYTES, num_bytes))
        for index, (_, num_bytes) in enumerate(files)
        for start in range(0, max(num_bytes, 1), _BLOCK_BYTES)
    )

    def read(index: int, start: int, end: int, buffer: bytearray) -> tuple[int, memoryview | OSError, bytearray]:
        try:
            return index, _read_range(files[index][0], start, memoryview(buffer)[: end - start]), buffer
        except OSError as error:
            return index, error, buffer

    depth = min(_MAX_THREADS, num_cores() + 2)  # more than the cores: some wait for the disk
    size = min(_BLOCK_BYTES, max((num_bytes for _, num_bytes in files), default=0))
    free = [bytearray(size) for _ in range(depth)]
    reading: deque[Future[tuple[int, memoryview | OSError, bytearray]]] = deque()
    with Pool(depth) as pool:
        for block in chain(ranges, [None] * depth):
            if len(reading) == depth or (block is None and reading):
                index, data, buffer = reading.popleft().result()
                yield index, data
                free.append(buffer)
            if block is not None:
                reading.append(pool.submit(read, *block, free.pop()))


def _read_range(path: Path, start: int, view: memoryview) -> memoryview:
    num_read = 0
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while num_read < view.nbytes:
            if not (count := file.readinto(view[num_read:])):
                break  # the file was cut since its size was read: the checksum will differ
            num_read += count
    return view[:num_read]


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
        self._hasher = _blake3(None)
        # One thread each to hash and to write: both need the blocks in order.
        self._hashing, self._writing, self._flushing = Pool(1), Pool(1), Pool(1)
        self._pending: deque[tuple[Future[None], Future[None]]] = deque()
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

        Producing the views (a copy from a device, say) overlaps with hashing and writing; about 8 blocks of at least
        4 MiB wait at a time. Raises OSError.
        """
        try:
            for block in _blocks(views):
                self._submit(block)
                while len(self._pending) > _MAX_PENDING:
                    self._await_block()
            while self._pending:
                self._await_block()
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

    def _submit(self, block: list[memoryview]) -> None:
        num_bytes = sum(view.nbytes for view in block)
        self._num_bytes += num_bytes
        if num_bytes < _INLINE_BYTES and not self._pending:
            self._hash(block)
            _write_views(self._descriptor, block)
        else:
            written = self._writing.submit(_write_views, self._descriptor, block)
            self._pending.append((self._hashing.submit(self._hash, block), written))
        self._num_unflushed += num_bytes
        if self._num_unflushed >= _FLUSH_BYTES and (self._flushed is None or self._flushed.done()):
            if self._flushed is not None:
                self._flushed.result()
            self._flushed, self._num_unflushed = self._flushing.submit(os.fdatasync, self._descriptor), 0

    def _hash(self, block: list[memoryview]) -> None:
        for view in block:
            self._hasher.update(view)

    def _await_block(self) -> None:
        for done in self._pending.popleft():
            done.result()


def _blocks(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The views gathered into blocks of _BLOCK_BYTES; larger views are cut, so that writing can begin early."""
    block: list[memoryview] = []
    room = _BLOCK_BYTES
    for view in views:
        rest = view
        while rest.nbytes:
            piece, rest = rest[:room], rest[room:]
            block.append(piece)
            room -= piece.nbytes
            if not room:
                yield block
                block, room = [], _BLOCK_BYTES
    if block:
        yield block


def _write_views(descriptor: int, views: list[memoryview]) -> None:
    """Write all of them at the file's position."""
    rest = list(views)
    while rest:
        count = os.writev(descriptor, rest[:_MAX_BUFFERS])
        while rest and count >= rest[0].nbytes:
            count -= rest.pop(0).nbytes
        if count:
            rest[0] = rest[0][count:]
