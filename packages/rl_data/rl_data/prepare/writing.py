"""The last pass of `prepare_data`: rows are selected by their keys and become parquet files, in the order read."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..files.table import Place, first_line
from .card import CONFLICT, EXACT, NEAR, File, Report
from .config import PrepareConfig
from .duplicates import groups, is_validation, keepers

_TEXTS = ("question", "answer", "ground_truth", "data_source")
_OPTIONAL = ("messages", "tools")
"""Columns of the training schema that are written only if a row has them."""
_BATCH_ROWS = 4096
_QUANTILES = {"smallest": 0.0, "median": 0.5, "95%": 0.95, "largest": 1.0}
Record = Mapping[str, Any]


class Spool:
    """Rows on the disk as JSON lines, because many do not fit into memory, and their keys in memory."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self._path, self._stream = path, path.open("w", encoding="utf-8")
        self._keys: list[Mapping[str, NDArray[Any]]] = []
        self._files: list[Place] = []
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
        self._stream.writelines(json.dumps(record) + "\n" for record in records)
        numbers = np.array([place.number for place in places], np.uint32)
        self._keys.append({**keys, "number": numbers, "file": np.full(len(places), len(self._files), np.uint32)})
        self._files.append(places[0])
        self.num_rows += len(records)

    def keys(self, name: str) -> NDArray[Any]:
        """One key of all rows."""
        return np.concatenate([keys[name] for keys in self._keys])

    def place(self, row: int) -> str:
        """The place from which a row was read."""
        return str(replace(self._files[self.keys("file")[row]], number=int(self.keys("number")[row])))

    def records(self) -> Iterator[list[dict[str, Any]]]:
        """All rows in batches."""
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
                hashlib.file_digest(stream, lambda: sha256)  # type: ignore[arg-type, return-value]
    return num_bytes, sha256.hexdigest()


def write_selection(spool: Spool, config: PrepareConfig, report: Report, folder: Path) -> None:
    """Drop duplicates, split by the hash of the normalized prompt, write the files, and complete the report.

    Equal prompts are on one side of the split. System messages and tools distinguish duplicates, but not the sides.

    Raises DataError if a file would have no rows.
    """
    import pyarrow as pa

    contents, truths = spool.keys("content"), spool.keys("ground_truth")
    rows = np.arange(len(contents))
    same = rows if config.duplicates == "keep" else keepers(groups(spool.keys("prompt")[:, None]), contents)
    keeper = keepers(groups(spool.keys("bands")), contents) if config.duplicates == "near" else same
    validation = is_validation(spool.keys("text"), config.seed, config.validation)
    masks = {"train.parquet": (keeper == rows) & ~validation, "val.parquet": (keeper == rows) & validation}
    names = ("train.parquet", "val.parquet")[: 2 if config.validation else 1]
    for name in names:
        if not masks[name].any():
            raise DataError(
                f"{name} would have none of the {(keeper == rows).sum()} rows: --validation={config.validation} is "
                "the probability with which each row is drawn for val.parquet",
                f"Give a {'smaller' if name == 'train.parquet' else 'larger'} one, another --seed, more rows, or "
                "--validation 0, which writes train.parquet alone.",
            )
    lengths = {part: spool.keys(f"{part}_length")[keeper == rows] for part in ("prompt", "response")}
    lengths["response"] = lengths["response"][lengths["response"] > 0]
    report.num_responses = len(lengths["response"])
    report.lengths = {
        part: {name: int(np.quantile(values, share, method="inverted_cdf")) for name, share in _QUANTILES.items()}
        for part, values in lengths.items()
        if len(values)
    }
    duplicates = {EXACT: same != rows, NEAR: (keeper != rows) & (same == rows)}
    duplicates[CONFLICT] = duplicates[EXACT] & (truths != truths[same])
    schema = _stored(spool.schema, report)
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(_parquet(folder / name, schema)) for name, mask in masks.items() if mask.any()
        }
        start = 0
        for records in spool.records():
            for row, record in enumerate(records, start):
                for reason in (reason for reason, mask in duplicates.items() if mask[row]):
                    report.count(reason, spool.place(row), _prompt(record), f"against: {spool.place(keeper[row])}")
            for name, file in files.items():
                kept = [record for record, is_in in zip(records, masks[name][start:], strict=False) if is_in]
                file.write_table(pa.Table.from_pylist(kept, schema=schema))
                report.num_ground_truths += sum(record["ground_truth"] is not None for record in kept)
                report.data_sources.update(record["data_source"] or "(none)" for record in kept)
            start += len(records)
    for name in files:
        report.files.append(File("written", name, "", int(masks[name].sum()), *fingerprint(folder / name)))


def _stored(schema: Any, report: Report) -> Any:
    """The schema without columns that are empty in every row, which parquet may not store."""
    import pyarrow as pa

    stored = pa.schema([field for field in schema if not _is_empty(field.type)])
    empty = [name for name in schema.names if name not in stored.names and name not in _OPTIONAL]
    report.notes += [f"the column {name!r} is empty in every row and is left out" for name in empty]
    return stored


def _is_empty(type_: Any) -> bool:
    import pyarrow.types as t

    return bool(t.is_null(type_) or (t.is_struct(type_) and all(_is_empty(field.type) for field in type_)))


def _parquet(path: Path, schema: Any) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetWriter(path, schema, compression="zstd")
    except pa.ArrowException as error:  # such as lists of empty structs
        problem = f"a column cannot be stored in parquet ({first_line(error)})"
        raise DataError(problem, "Leave it out: --extra-columns names those to keep.") from error


def _prompt(record: Record) -> str:
    return str(record.get("question") or "\n".join(str(message["content"]) for message in record["prompt"]))
