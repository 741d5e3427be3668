"""The last pass of `prepare_data`: rows are selected by their keys and become parquet files, in the order read."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ..errors import DataError
from ..files.table import first_line
from .card import CONFLICT, EXACT, MAX_EXAMPLES, NEAR, File, Report
from .config import PrepareConfig
from .duplicates import Keys, firsts, is_validation
from .layouts import Record, prompt_of, response_of, text_of

_WRITTEN = {"train.parquet", "val.parquet", "card.md", "card.html"}  # card.html: by version 0.2
_TEXTS = ("question", "answer", "ground_truth", "data_source")
_OPTIONAL = ("messages", "tools")
"""Columns of the training schema that are written only if a row has them."""
_BATCH_ROWS = 4096


@contextmanager
def output_folder(out: Path, *, overwrite: bool) -> Iterator[tuple[Path, str]]:
    """A folder beside `out` that becomes `out` at the end of the block, and a folder for temporary files.

    Both are deleted if the block fails. Raises DataError if `out` exists and may not be replaced.
    """
    if out.exists() and not out.is_dir():
        raise DataError("is a file, and prepare writes a folder", "Give another --out.", file=str(out))
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    if others := sorted(names - _WRITTEN):
        problem = f"has files that prepare did not write ({', '.join(others[:5])})"
        raise DataError(problem, "Give a new folder as --out.", file=str(out))
    if names and not overwrite:
        raise DataError("exists", "Give another --out, or replace it: --overwrite.", file=str(out))
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        folder = Path(temporary, "out")
        folder.mkdir()
        yield folder, temporary
        if out.exists():
            shutil.rmtree(out)
        folder.rename(out)


def fingerprint(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file; of a folder, of the names and contents of its files."""
    sha256, num_bytes = hashlib.sha256(), 0
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            sha256.update(str(file.relative_to(path)).encode() if file != path else b"")
            num_bytes += file.stat().st_size
            with file.open("rb") as stream:
                hashlib.file_digest(stream, lambda: sha256)
    return num_bytes, sha256.hexdigest()


def write_selection(rows: Any, config: PrepareConfig, report: Report, folder: Path) -> None:
    """Drop duplicates from a `datasets.Dataset` of rows, split it, write the files, and complete the report.

    The hash of the normalized prompt splits the rows, so equal prompts are on one side. System messages and tools
    distinguish duplicates, but not the sides.

    Raises DataError if a file would have no rows, or for a column with values of different types.
    """
    numbers = np.arange(len(rows))
    same = numbers if config.duplicates == "keep" else firsts(_keys(rows, "prompt")[:, None], _keys(rows, "content"))
    near = firsts(_bands(rows), _keys(rows, "content")) if config.duplicates == "near" else same
    is_kept = near == numbers
    validation = is_validation(_keys(rows, "text"), config.seed, config.validation)
    masks = {"train.parquet": is_kept & ~validation}
    masks |= {"val.parquet": is_kept & validation} if config.validation else {}
    for name, mask in masks.items():
        if not mask.any():
            raise DataError(
                f"{name} would have none of the {is_kept.sum()} rows: --validation={config.validation} is the "
                "probability with which each row is drawn for val.parquet",
                f"Give a {'smaller' if name == 'train.parquet' else 'larger'} one, another --seed, more rows, or "
                "--validation 0, which writes train.parquet alone.",
            )
    truths, is_exact = _keys(rows, "ground_truth"), same != numbers
    for reason, mask, first in (
        (EXACT, is_exact, same),
        (NEAR, ~is_kept & ~is_exact, near),
        (CONFLICT, is_exact & (truths != truths[same]), same),
    ):
        report.counts[reason] += int(mask.sum())
        for row in np.flatnonzero(mask)[:MAX_EXAMPLES].tolist():
            report.show(reason, *_shown(rows[row]), "against:", *_shown(rows[int(first[row])]))
    schema = _stored(_schema(rows.select(np.flatnonzero(is_kept))), report)
    for name, mask in masks.items():
        _write(rows.select(np.flatnonzero(mask)), schema, folder / name, report)


def _keys(rows: Any, name: str) -> Keys:
    keys: Keys = rows.data.column(name).to_numpy()
    return keys


def _bands(rows: Any) -> Keys:
    bands: Keys = rows.data.column("bands").combine_chunks().flatten().to_numpy()
    return bands.reshape(len(rows), -1)


def _shown(row: dict[str, Any]) -> tuple[str, str]:
    return row["place"], text_of(prompt_of(json.loads(row["record"])))


def _records(rows: Any) -> Iterator[list[Record]]:
    """The decoded rows, in batches."""
    for batch in rows.iter(_BATCH_ROWS):
        yield list(map(json.loads, batch["record"]))


def _schema(rows: Any) -> Any:
    """The `pyarrow.Schema` of all rows. Raises DataError for a column with values of different types."""
    import pyarrow as pa

    schema = pa.schema([])
    for records in _records(rows):
        for name in dict.fromkeys(name for record in records for name in record):
            try:
                type_ = pa.string() if name in _TEXTS else pa.array([record.get(name) for record in records]).type
                one = pa.schema([(name, type_)])
                schema = pa.unify_schemas([schema, one], promote_options="permissive")
            except (pa.ArrowException, OverflowError, ValueError, TypeError) as error:
                problem = f"column {name!r} has values of different types ({first_line(error)}), as parquet cannot"
                remedy = "Write them as text, or leave the column out: --extra-columns names those to keep."
                raise DataError(problem, remedy, column=name) from error
    return schema


def _stored(schema: Any, report: Report) -> Any:
    """The schema without columns that parquet cannot store: null, or structs without fields, in every row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def can_store(field: Any) -> bool:
        try:
            pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([field])).close()
        except pa.ArrowException:
            return False
        return bool(field.type != pa.null())

    stored = pa.schema(filter(can_store, schema))
    empty = [name for name in schema.names if name not in stored.names and name not in _OPTIONAL]
    report.notes += [f"the column {name!r} is empty in every row and is left out" for name in empty]
    return stored


def _write(rows: Any, schema: Any, path: Path, report: Report) -> None:
    """Write a parquet file, and add it to the report."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetWriter(path, schema, compression="zstd") as file:
        for records in _records(rows):
            file.write_table(pa.Table.from_pylist(records, schema=schema))
            report.num_ground_truths += sum(record["ground_truth"] is not None for record in records)
            report.num_responses += sum(bool(response_of(record)) for record in records)
            report.data_sources.update(record["data_source"] or "(none)" for record in records)
    report.files.append(File("written", path.name, "", len(rows), *fingerprint(path)))
