"""Opens a data file as a table. Its name decides how it is read."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from ..errors import DataError
from .arrow import open_parquet, open_saved
from .csv import open_csv
from .json_lines import open_json
from .table import OnBad, Table, first_line, refuse

_OPENERS = {".jsonl": open_json, ".ndjson": open_json, ".json": open_json, ".csv": open_csv}
"""By suffix; any other file is read as parquet."""


def open_table(file: str | Path, on_bad: OnBad = refuse) -> Table:
    """Open a data file: `.jsonl`, `.ndjson`, `.json`, `.csv`, each also with `.gz`; a folder saved by Hugging Face
    `datasets`, with several splits as `folder:split`; or parquet.

    `on_bad` takes the errors of rows that cannot be read, which are then left out. Raises DataError for a file that
    does not exist, cannot be read or has no rows.
    """
    name = str(file)
    path, split = Path(name), None
    try:
        folder, colon, last = name.rpartition(":")
        if colon and not path.exists() and Path(folder).is_dir():
            path, split = Path(folder), last
        path.stat()
    except (OSError, ValueError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", "") or error
        raise DataError(str(reason), f"Check the path; relative paths start at {Path.cwd()}.", file=name) from None
    if any((path / one).is_file() for one in ("state.json", "dataset_dict.json")):
        return replace(open_saved(path, name, split), on_bad=on_bad)
    if not path.is_file():
        problem = "is a folder that `datasets` did not save" if path.is_dir() else "is a device, pipe or socket"
        raise DataError(problem, "Give the data files themselves.", file=name)
    is_gzip = path.suffix.lower() == ".gz"
    opener = _OPENERS.get((path.with_suffix("") if is_gzip else path).suffix.lower())
    table = opener(partial(_open_stream, path, name, is_gzip), name) if opener else open_parquet(path, name)
    return replace(table, on_bad=on_bad)


@contextmanager
def _open_stream(path: Path, name: str, is_gzip: bool) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed. Raises DataError if it cannot be opened, or for damage read in the block."""
    try:
        with gzip.open(path) if is_gzip else path.open("rb") as stream:
            yield cast("BinaryIO", stream)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot be read ({first_line(error)})", "Copy it again.", file=name) from error
