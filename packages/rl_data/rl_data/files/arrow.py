"""Parquet files, and data sets that `datasets` saved, read one batch at a time; nothing is downloaded or executed."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError
from .table import OnBad, Place, Rows, Table, first_line, no_rows

_BATCH_SIZE = 4096


def open_parquet(path: Path, file: str) -> Table:
    """The table of a parquet file. Raises DataError if it cannot be read or has no rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        remedy = "Copy it again if it is incomplete; other files end in .jsonl, .json or .csv, or these and .gz."
        raise DataError(f"cannot be read as parquet ({first_line(error)})", remedy, file=file) from error
    if parquet.metadata.num_rows == 0:
        raise no_rows(file)
    return _arrow_table(file, parquet.schema_arrow, lambda columns: parquet.iter_batches(_BATCH_SIZE, columns=columns))


def open_saved(folder: Path, file: str, split: str | None) -> Table:
    """The table of a saved data set, or of one split of a saved `DatasetDict`.

    Raises DataError if the split is missing, unnecessary or unknown, if the data set cannot be read, or if it is empty.
    """
    from datasets import load_from_disk

    index, data = folder / "dataset_dict.json", None
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["splits"] if index.is_file() else [None]
        if split in names:  # the other splits may be damaged
            data = load_from_disk(str(folder / (split or "")), keep_in_memory=False).with_format("arrow")
    except Exception as error:  # datasets raises many kinds for damaged and missing files
        raise DataError(f"is no saved data set ({first_line(error)})", "Save it again.", file=file) from error
    if data is None:
        remedy = f"Give {' or '.join(f'{folder}:{name}' if name else str(folder) for name in names)}."
        raise DataError("has splits" if split is None else f"has no split {split!r}", remedy, file=file)
    if len(data) == 0:
        raise no_rows(file)
    read = lambda columns: data.select_columns(columns).iter(batch_size=_BATCH_SIZE)  # noqa: E731
    return _arrow_table(file, data.features.arrow_schema, read)


def _arrow_table(file: str, schema: Any, read_batches: Callable[[list[str]], Iterable[Any]]) -> Table:
    """A table whose unusable columns are those whose type JSON does not have."""
    import pyarrow as pa

    types = dict(zip(schema.names, schema.types, strict=True))

    def read(columns: Sequence[str], _text: Collection[str], _on_bad: OnBad) -> Rows:
        rows = _python_rows(file, read_batches(list(columns)))
        if not any("arrow.json" in str(types[name]) for name in columns):
            return rows
        from datasets import Features  # its `Json` values are stored as JSON text

        features = Features.from_arrow_schema(pa.schema([schema.field(name) for name in columns]))
        return ((place, features.decode_example(row)) for place, row in rows)

    unusable = {name: f"has the type {type_}" for name, type_ in types.items() if not _fits_json(type_)}
    return Table(file=file, columns=schema.names, read=read, unusable=unusable)


def batches_of(file: str, batches: Iterable[Any]) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """The batches, and their rows as Python values. Raises DataError for data that cannot be read."""
    num_read = 0
    iterator = iter(batches)
    while True:
        try:
            batch = next(iterator, None)
            rows = [] if batch is None else batch.to_pylist(maps_as_pydicts="strict")
        except DataError:
            raise
        except Exception as error:  # pyarrow raises many kinds for damaged, encrypted and unsupported data
            problem = f"cannot be read after row {num_read} ({first_line(error)})"
            raise DataError(problem, "Copy it again, or save it as UTF-8.", file=file) from error
        if batch is None:
            return
        yield batch, rows
        num_read += len(rows)


def _python_rows(file: str, batches: Iterable[Any]) -> Rows:
    number = 0
    for _, rows in batches_of(file, batches):
        for row in rows:
            yield Place(file=file, number=number, is_padded=True), row
            number += 1


def _fits_json(type_: Any) -> bool:
    """True for a `pyarrow.DataType` whose values JSON can hold."""
    import pyarrow.types as t

    if t.is_dictionary(type_):
        return _fits_json(type_.value_type)
    if t.is_nested(type_):
        return not t.is_union(type_) and all(_fits_json(type_.field(index).type) for index in range(type_.num_fields))
    plain = (t.is_null, t.is_boolean, t.is_integer, t.is_floating, t.is_string, t.is_large_string, t.is_string_view)
    return any(check(type_) for check in plain) or "arrow.json" in str(type_)
