"""The last pass of `prepare_data`: rows are selected by their keys and become parquet files, in the order read."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..files.table import Place, first_line
from .card import CONFLICT, EXACT, MAX_EXAMPLES, NEAR, File, Report
from .config import PrepareConfig
from .duplicates import groups, is_validation, keepers
from .layouts import Record, prompt_of, text_of

_TEXTS = ("question", "answer", "ground_truth", "data_source")
_OPTIONAL = ("messages", "tools")
"""Columns of the training schema that are written only if a row has them."""
_BATCH_ROWS = 4096
_QUANTILES = {"smallest": 0.0, "median": 0.5, "95%": 0.95, "largest": 1.0}
Mask = NDArray[np.bool_]


class Spool:
    """Rows on the disk as JSON lines, because many do not fit into memory, and their keys in memory."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self._path, self._stream = path, path.open("w", encoding="utf-8")
        self._keys: list[dict[str, NDArray[Any]]] = []
        self.num_rows = 0
        self.schema: Any = pa.schema([])
        """The `pyarrow.Schema` that all rows fit."""

    def add(self, records: Sequence[Record], places: Sequence[Place], keys: Mapping[str, NDArray[Any]]) -> None:
        """Append rows. Raises DataError for values that do not fit one type of a column, such as text and numbers."""
        import pyarrow as pa

        for name in dict.fromkeys(name for record in records for name in record):
            try:
                type_ = pa.string() if name in _TEXTS else pa.array([record.get(name) for record in records]).type
                one = pa.schema([(name, type_)])
                self.schema = pa.unify_schemas([self.schema, one], promote_options="permissive")
            except (pa.ArrowException, OverflowError, ValueError, TypeError) as error:
                problem = f"column {name!r} has values of different types ({first_line(error)}), as parquet cannot"
                remedy = "Write them as text, or leave the column out: --extra-columns names those to keep."
                raise DataError(problem, remedy, file=places[0].file, column=name) from error
        rows = zip(map(str, places), records, strict=True)
        self._stream.writelines(json.dumps(row) + "\n" for row in rows)
        self._keys.append(dict(keys))
        self.num_rows += len(records)

    def keys(self, name: str) -> NDArray[Any]:
        """One key of all rows, whose parts are freed: each key is read once."""
        return np.concatenate([keys.pop(name) for keys in self._keys])

    def rows(self) -> Iterator[list[tuple[str, Record]]]:
        """Places and records of all rows, in batches."""
        self._stream.close()
        with self._path.open(encoding="utf-8") as stream:
            while lines := list(islice(stream, _BATCH_ROWS)):
                yield list(map(json.loads, lines))
        self._path.unlink()


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


def write_selection(spool: Spool, config: PrepareConfig, report: Report, folder: Path) -> None:
    """Drop duplicates, split by the hash of the normalized prompt, write the files, and complete the report.

    Equal prompts are on one side of the split. System messages and tools distinguish duplicates, but not the sides.

    Raises DataError if a file would have no rows.
    """
    contents = spool.keys("content")
    rows = np.arange(len(contents))
    same = rows if config.duplicates == "keep" else keepers(groups(spool.keys("prompt")[:, None]), contents)
    keeper = keepers(groups(spool.keys("bands")), contents) if config.duplicates == "near" else same
    is_kept = keeper == rows
    validation = is_validation(spool.keys("text"), config.seed, config.validation)
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
    _describe_lengths(spool, is_kept, report)
    duplicates = {EXACT: same != rows, NEAR: ~is_kept & (same == rows)}
    truths = spool.keys("ground_truth")
    duplicates[CONFLICT] = duplicates[EXACT] & (truths != truths[same])
    firsts = {reason: np.flatnonzero(mask)[:MAX_EXAMPLES].tolist() for reason, mask in duplicates.items()}
    shown = _write(spool, masks, {row for rows in firsts.values() for row in (*rows, *keeper[rows])}, report, folder)
    for reason, rows_shown in firsts.items():
        report.counts[reason] += int(duplicates[reason].sum())
        for row in rows_shown:
            report.show(reason, *shown[row], "against:", *shown[keeper[row]])


def _describe_lengths(spool: Spool, is_kept: Mask, report: Report) -> None:
    for part in ("prompt", "response"):
        lengths = spool.keys(f"{part}_length")[is_kept]
        if part == "response":
            lengths = lengths[lengths > 0]
            report.num_responses = len(lengths)
        if len(lengths):
            quantiles = np.quantile(lengths, list(_QUANTILES.values()), method="inverted_cdf")
            report.lengths[part] = dict(zip(_QUANTILES, map(int, quantiles), strict=True))


def _write(
    spool: Spool, masks: Mapping[str, Mask], wanted: set[int], report: Report, folder: Path
) -> dict[int, tuple[str, str]]:
    """Write the rows of each file, and add them to the report. Returns place and prompt of the wanted rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema, shown, start = _stored(spool.schema, report), dict[int, tuple[str, str]](), 0
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(pq.ParquetWriter(folder / name, schema, compression="zstd")) for name in masks
        }
        for rows in spool.rows():
            for row in wanted.intersection(range(start, start + len(rows))):
                place, record = rows[row - start]
                shown[row] = place, text_of(prompt_of(record))
            for name, file in files.items():
                kept = [record for (_, record), is_in in zip(rows, masks[name][start:], strict=False) if is_in]
                file.write_table(pa.Table.from_pylist(kept, schema=schema))
                report.num_ground_truths += sum(record["ground_truth"] is not None for record in kept)
                report.data_sources.update(record["data_source"] or "(none)" for record in kept)
            start += len(rows)
    for name in files:
        report.files.append(File("written", name, "", int(masks[name].sum()), *fingerprint(folder / name)))
    return shown


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
