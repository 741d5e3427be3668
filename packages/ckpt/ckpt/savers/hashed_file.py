"""A file for programs that write by themselves (torch.save): hashed on all cores while it is written."""

from __future__ import annotations

import hashlib
import io
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ..digest import CHUNK_BYTES, FLUSH_BYTES, combine, hash_views, num_threads, write_views
from ..manifest import FileEntry
from ..threads import Pool

__all__ = ["HashedFile"]

#: Below this, handing work to threads costs more than the work.
_INLINE_BYTES = 1 << 20


class HashedFile(io.RawIOBase):
    """A new file, to be written from its beginning to its end; `entry` describes it once it is closed.

        with HashedFile(path) as file:
            torch.save(tree, file)
        file.entry

    A buffer is hashed and written before `write` returns, so the writer may reuse it. The disk is asked to begin now
    and then; when the file is closed all of it is there.
    """

    def __init__(self, path: Path, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._descriptor = -1  # `close` also runs when the file cannot be opened
        self._has_failed = False
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._chunk_bytes = chunk_bytes
        self._hashers, self._flusher = Pool(num_threads()), Pool(1)
        self._digests: list[bytes] = []
        self._open_chunk = hashlib.sha256()
        self._num_open = self._num_bytes = self._num_unflushed = 0
        self._flushed: Future[None] | None = None
        self.entry: FileEntry | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Write all of `data`; raises what the system says, what the flushes before met included."""
        view = memoryview(data).cast("B")
        try:
            self._write(view)
        except BaseException:
            self._has_failed = True
            raise
        return view.nbytes

    def _write(self, view: memoryview) -> None:
        if not view.nbytes:
            return
        if view.nbytes < _INLINE_BYTES:
            write_views(self._descriptor, [view])
            for piece in self._pieces(view):
                self._add(piece, None)
        else:
            # Whole chunks are hashed side by side, while this thread writes.
            pieces = [(piece, self._begin(piece)) for piece in self._pieces(view)]
            write_views(self._descriptor, [view])
            for piece, begun in pieces:
                self._add(piece, begun)
        self._num_bytes += view.nbytes
        self._flush_now_and_then(view.nbytes)

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        if self._descriptor < 0:
            return
        try:
            if self._has_failed:  # its error is on the way
                return
            os.fsync(self._descriptor)
            if self._flushed is not None:
                self._flushed.result()
            if self._num_open or not self._digests:
                self._digests.append(self._open_chunk.digest())
            self.entry = FileEntry(num_bytes=self._num_bytes, sha256=combine(self._digests))
        finally:
            os.close(self._descriptor)
            for pool in (self._hashers, self._flusher):
                with pool:
                    pass

    def _pieces(self, view: memoryview) -> list[memoryview]:
        """The view cut where chunks of the file begin."""
        first = min(self._chunk_bytes - self._num_open, view.nbytes)
        starts = [0, *range(first, view.nbytes, self._chunk_bytes)]
        return [view[start:end] for start, end in zip(starts, [*starts[1:], view.nbytes], strict=True)]

    def _begin(self, piece: memoryview) -> Future[bytes] | None:
        is_whole = piece.nbytes == self._chunk_bytes
        return self._hashers.submit(hash_views, [piece]) if is_whole else None

    def _add(self, piece: memoryview, begun: Future[bytes] | None) -> None:
        if begun is not None:
            self._digests.append(begun.result())
            return
        self._open_chunk.update(piece)
        self._num_open += piece.nbytes
        if self._num_open == self._chunk_bytes:
            self._digests.append(self._open_chunk.digest())
            self._open_chunk, self._num_open = hashlib.sha256(), 0

    def _flush_now_and_then(self, num_bytes: int) -> None:
        self._num_unflushed += num_bytes
        if self._num_unflushed < FLUSH_BYTES or not (self._flushed is None or self._flushed.done()):
            return
        if self._flushed is not None:
            self._flushed.result()
        self._flushed, self._num_unflushed = self._flusher.submit(os.fdatasync, self._descriptor), 0
