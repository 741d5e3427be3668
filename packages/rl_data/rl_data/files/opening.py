"""Opens a data file as a table. Its name decides how it is read."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import BinaryIO, cast

from ..errors import DataError
from .arrow import is_saved, open_parquet, open_saved
from .csv import open_csv
from .json_lines import open_json
from .table import OnBad, Table, first_line, refuse

_OPENERS = {".jsonl": open_json, ".ndjson": open_json, ".json": open_json, ".csv": open_csv}
"""By suffix; any other file is read as parquet."""
KINDS = "parquet, .jsonl, .json or .csv (or these and .gz), or a folder saved by `datasets`"


def open_table(file: str | Path, on_bad: OnBad = refuse) -> Table:
    """Open a data file: `.jsonl`, `.ndjson`, `.json`, `.csv`, each also with `.gz`; a folder saved by Hugging Face
    `datasets`, with several splits as `folder:split`; or parquet.

    Args:
        on_bad: takes the errors of rows that cannot be read, which are then left out.

    Raises DataError if it does not exist, cannot be read or has no rows.
    """
    name, (path, split) = str(file), _split(str(file))
    if not name:
        raise DataError("an empty file name was given", "Name a data file, or give an empty list: [].", file=name)
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", "") or error
        raise DataError(str(why), f"Check the path; relative paths start at {Path.cwd()}.", file=name) from None
    if S_ISDIR(status.st_mode):
        return _open_folder(path, name, split, on_bad)
    if not S_ISREG(status.st_mode):
        raise DataError("is a device, pipe or socket", "Give a regular file.", file=name)
    if status.st_size == 0:
        raise DataError("the file is empty (0 bytes)", "Write or copy it again.", file=name)
    return _open_file(path, name, on_bad)


def _split(name: str) -> tuple[Path, str | None]:
    """The path and the split of `folder:split`; a name with a colon that exists is a path."""
    folder, colon, split = name.rpartition(":")
    try:
        if colon and not Path(name).exists() and Path(folder).is_dir():
            return Path(folder), split
    except (OSError, ValueError):  # a name that no file can have: reported when it is opened
        pass
    return Path(name), None


def _open_folder(path: Path, name: str, split: str | None, on_bad: OnBad) -> Table:
    if is_saved(path):
        return open_saved(path, name, split, on_bad)
    children = ", ".join(sorted(child.name for child in path.glob("*.*"))[:5]) or "no file"
    problem = f"is a folder that `datasets` did not save (it contains {children})"
    raise DataError(problem, f"Give the files themselves: {KINDS}.", file=name)


def _open_file(path: Path, name: str, on_bad: OnBad) -> Table:
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    is_gzip = suffixes[-1:] == [".gz"]
    if is_gzip:
        suffixes.pop()
    suffix = suffixes[-1] if suffixes else ""
    if opener := _OPENERS.get(suffix):
        return opener(partial(_open_stream, path, name, is_gzip), name, on_bad)
    if is_gzip:
        raise DataError("only .jsonl, .json and .csv may be compressed", "Decompress it.", file=name)
    return open_parquet(path, name, on_bad)


@contextmanager
def _open_stream(path: Path, name: str, is_gzip: bool) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed. Raises DataError if it cannot be opened, or for damage read in the block."""
    try:
        with gzip.open(path) if is_gzip else path.open("rb") as stream:
            yield cast("BinaryIO", stream)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot be read ({first_line(error)})", "Copy it again.", file=name) from error
