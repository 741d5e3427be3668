"""The checksum of a file, computed by as many threads as there are cores.

A file of at most CHUNK_BYTES has its SHA-256, as sha256sum prints it. A larger one is cut into chunks of CHUNK_BYTES,
the last one shorter, and its checksum is the SHA-256 of the chunks' SHA-256 digests (32 bytes each) in order: SHA-256
of one stream of bytes cannot use two cores. The manifest notes the chunk size; in manifests of format 1 there is none,
and every file has its plain SHA-256.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from .threads import Pool, num_cores

__all__ = [
    "CHUNK_BYTES",
    "FLUSH_BYTES",
    "combine",
    "hash_files",
    "hash_views",
    "num_threads",
    "write_hashed",
    "write_views",
]

CHUNK_BYTES = 16 << 20
#: Read at a time by one thread: fits a core's cache, so that hashing does not wait for memory.
_READ_BYTES = 1 << 20
#: Written between two requests to the disk to begin. Left alone, Linux begins when a tenth of the memory waits.
FLUSH_BYTES = 256 << 20
_MAX_THREADS = 16
#: Buffers of one writev; Linux allows 1024.
_MAX_BUFFERS = 512


def num_threads() -> int:
    """How many hash side by side."""
    # More than the cores, for some wait for the disk.
    return min(_MAX_THREADS, num_cores() + 2)


def combine(digests: Sequence[bytes]) -> str:
    """The checksum of a file, as hex, from the SHA-256 digests of its chunks."""
    return digests[0].hex() if len(digests) == 1 else hashlib.sha256(b"".join(digests)).hexdigest()


def hash_files(
    files: Sequence[tuple[Path, int]],
    *,
    chunk_bytes: int | None = CHUNK_BYTES,
    on_read: Callable[[int], None] | None = None,
) -> list[str | OSError]:
    """The checksum of each file, given with its size, or what the system said when it could not be read.

    `chunk_bytes` None: the plain SHA-256. `on_read` is told the bytes of each chunk when it has been read, from
    whatever thread read it.
    """

    def digest(path: Path, start: int, end: int) -> bytes | OSError:
        try:
            found = _hash_range(path, start, end)
        except OSError as error:
            return error
        if on_read is not None:
            on_read(end - start)
        return found

    with Pool(num_threads()) as pool:
        futures = [
            [pool.submit(digest, path, start, end) for start, end in _ranges(num_bytes, chunk_bytes)]
            for path, num_bytes in files
        ]
        results = [[future.result() for future in chunks] for chunks in futures]
    checksums: list[str | OSError] = []
    for chunks in results:
        failed = next((chunk for chunk in chunks if isinstance(chunk, OSError)), None)
        checksums.append(failed or combine([chunk for chunk in chunks if isinstance(chunk, bytes)]))
    return checksums


def _ranges(num_bytes: int, chunk_bytes: int | None) -> list[tuple[int, int]]:
    """(start, end) of every chunk; an empty file is one empty chunk."""
    size = chunk_bytes or max(num_bytes, 1)
    return [(start, min(start + size, num_bytes)) for start in range(0, max(num_bytes, 1), size)]


def _hash_range(path: Path, start: int, end: int) -> bytes:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(_READ_BYTES, end - start)))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while start < end:
            count = os.preadv(descriptor, [buffer[: end - start]], start)
            if count == 0:
                break  # it has been cut since its size was asked; the digest of what is there will not fit
            digest.update(buffer[:count])
            start += count
    finally:
        os.close(descriptor)
    return digest.digest()


def write_hashed(path: Path, views: Iterable[memoryview], num_bytes: int, *, chunk_bytes: int = CHUNK_BYTES) -> str:
    """Write `views`, `num_bytes` in all, to a new file, force it to the disk, and return its checksum.

    Producing the views (copying from a device, say), writing, hashing and the disk's own work go on side by side. A
    view is let go when it has been hashed and written; about 2 chunks a thread wait at a time.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        if num_bytes <= chunk_bytes:  # no work for threads
            (chunk,) = list(_chunks(views, chunk_bytes)) or [[]]
            digest = hash_views(chunk)
            write_views(descriptor, chunk)
            os.fsync(descriptor)
            return digest.hex()
        return _write_in_threads(descriptor, _chunks(views, chunk_bytes))
    finally:
        os.close(descriptor)


def _write_in_threads(descriptor: int, chunks: Iterable[list[memoryview]]) -> str:
    digests: list[Future[bytes]] = []
    waiting: deque[tuple[Future[bytes], Future[None]]] = deque()
    flushed: Future[None] | None = None
    num_begun = 0
    count = num_threads()
    # One thread writes: the kernel lets one in at a time, and the order keeps the file in one piece on the disk.
    with Pool(count) as hashers, Pool(1) as writer, Pool(1) as flusher:
        for chunk in chunks:
            digests.append(hashers.submit(hash_views, chunk))
            waiting.append((digests[-1], writer.submit(write_views, descriptor, chunk)))
            num_begun += sum(view.nbytes for view in chunk)
            del chunk
            while len(waiting) > 2 * count:
                hashed, written = waiting.popleft()
                hashed.result()
                written.result()
            if num_begun >= FLUSH_BYTES and (flushed is None or flushed.done()):
                if flushed is not None:
                    flushed.result()
                flushed = flusher.submit(os.fdatasync, descriptor)
                num_begun = 0
        for _, written in waiting:
            written.result()
        os.fsync(descriptor)
        if flushed is not None:
            flushed.result()
        return combine([future.result() for future in digests])


def _chunks(views: Iterable[memoryview], chunk_bytes: int) -> Iterator[list[memoryview]]:
    """The views cut and gathered into chunks of one size, the last one shorter."""
    chunk: list[memoryview] = []
    room = chunk_bytes
    for view in views:
        rest = view
        while rest.nbytes:
            piece, rest = rest[:room], rest[room:]
            chunk.append(piece)
            room -= piece.nbytes
            if not room:
                yield chunk
                chunk, room = [], chunk_bytes
    if chunk:
        yield chunk


def hash_views(views: list[memoryview]) -> bytes:
    """SHA-256 of views laid end to end."""
    digest = hashlib.sha256()
    for view in views:
        digest.update(view)
    return digest.digest()


def write_views(descriptor: int, views: list[memoryview]) -> None:
    """Write all of them at the file's position."""
    rest = list(views)
    while rest:
        count = os.writev(descriptor, rest[:_MAX_BUFFERS])
        while rest and count >= rest[0].nbytes:
            count -= rest.pop(0).nbytes
        if count:
            rest[0] = rest[0][count:]
