"""The folder of results, which is written beside its final place and put there in one step."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import DataError

_WRITTEN = {"train.parquet", "val.parquet", "card.md", "card.html"}  # card.html: by version 0.2


@contextmanager
def output_folder(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` at the end of the block, and is deleted if the block fails.

    Readers of `out` see the old files or the new ones, never some of both. The rest of a killed process is deleted.

    Raises DataError if `out` exists and may not be replaced, or if another process writes it.
    """
    _check_replaceable(out, overwrite=overwrite)
    out = out.resolve()
    partial, old = out.parent / f".{out.name}.partial", out.parent / f".{out.name}.old"
    partial.mkdir(parents=True, exist_ok=True)
    lock = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError("another process writes it", "Wait, or give another --out.", file=str(out)) from None
        try:
            for path in partial.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            yield partial
            shutil.rmtree(old, ignore_errors=True)
            if out.exists():
                out.rename(old)
            partial.rename(out)
        finally:
            for folder in (partial, old):
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _check_replaceable(out: Path, *, overwrite: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise DataError("is a file, and prepare writes a folder", "Give another --out.", file=str(out))
    names = {path.name for path in out.iterdir()}
    if others := sorted(names - _WRITTEN):
        problem = f"has files that prepare did not write ({', '.join(others[:5])})"
        raise DataError(problem, "Give a new folder as --out.", file=str(out))
    if names and not overwrite:
        raise DataError("exists", "Give another --out, or replace it: --overwrite.", file=str(out))
