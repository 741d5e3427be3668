"""The folder of results: written beside its final place, and put there in one step."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..files.table import first_line

WRITTEN = ("train.parquet", "val.parquet", "card.md", "card.html")
_ROW_GROUP_BYTES = 32 << 20


@contextmanager
def output_folder(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` at the end of the block, and is deleted if the block fails.

    Whoever opens `out` finds the old files or the new ones, never some of both. What a killed process left is deleted.

    Raises DataError if `out` exists and may not be replaced, or if another process writes it.
    """
    check_replaceable(out, overwrite=overwrite)
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f".{out.name}.partial"
    partial.mkdir(exist_ok=True)
    lock = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{out}: another process is writing it. Wait for it, or give another --out.") from None
        try:
            for path in partial.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            yield partial
            _publish(partial, out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    finally:
        os.close(lock)


def check_replaceable(out: Path, *, overwrite: bool) -> None:
    """Raises DataError if `out` exists, unless it is empty, or an earlier result and `overwrite` is given."""
    if not out.exists():
        return
    if not out.is_dir():
        raise DataError(f"{out}: is a file, and prepare writes a folder. Give another --out.", file=str(out))
    found = sorted(path.name for path in out.iterdir())
    if other := [name for name in found if name not in WRITTEN]:
        what = f"{out}: has files that prepare did not write ({', '.join(other[:5])})"
        raise DataError(f"{what}. Give a new folder as --out.", file=str(out))
    if found and not overwrite:
        raise DataError(f"{out}: exists. Give another --out, or replace it: --overwrite.", file=str(out))


def _publish(partial: Path, out: Path) -> None:
    """Rename `partial` to `out`; what was there is moved away first and deleted afterwards."""
    old = out.parent / f".{out.name}.old"
    if out.exists():
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)


class ParquetFile:
    """A parquet file that is written table by table, in row groups of about 32 MiB."""

    def __init__(self, path: Path, schema: Any) -> None:
        """Opens a new file. Raises DataError for types that parquet does not have, such as empty structs."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path, self.num_rows = path, 0
        self._waiting = list[Any]()
        try:
            self._writer = pq.ParquetWriter(str(path), schema, compression="zstd")
        except pa.ArrowException as error:
            what = f"a column cannot be stored in parquet ({first_line(error)})"
            raise DataError(f"{what}. Leave it out: --extra-columns names those to keep.") from error

    def add(self, table: Any) -> None:
        """Append rows of the schema."""
        self.num_rows += len(table)
        self._waiting.append(table)
        if sum(waiting.nbytes for waiting in self._waiting) >= _ROW_GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        """Write what is left and the footer."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._waiting:
            self._writer.write_table(pa.concat_tables(self._waiting))
            self._waiting.clear()
