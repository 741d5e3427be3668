"""Parquet files, and data sets that `datasets` saved, read one batch at a time; nothing is downloaded or executed."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import DataError
from .table import OnBad, Place, Rows, Table, first_line, no_rows, refuse, repeated

_BATCH_SIZE = 4096
"""Rows converted to Python in one call."""
Batches = Callable[[Sequence[str]], Iterable[Any]]
"""The data of some columns as `pyarrow.RecordBatch` or `pyarrow.Table` of at most `_BATCH_SIZE` rows."""
_SET, _SPLITS = "state.json", "dataset_dict.json"


def open_parquet(path: Path, file: str, on_bad: OnBad = refuse) -> Table:
    """The table of a parquet file. Raises DataError if it cannot be read or has no rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        remedy = (
            "Copy it again if it is incomplete; the names of other files end in .jsonl, .json or .csv, or in these "
            "and .gz."
        )
        raise DataError(f"cannot be read as parquet ({first_line(error)})", remedy, file=file) from error
    if parquet.metadata.num_rows == 0:
        raise no_rows(file)

    read = partial(parquet.iter_batches, _BATCH_SIZE)
    return _arrow_table(file, parquet.schema_arrow, lambda columns: read(columns=list(columns)), on_bad)


def is_saved(folder: Path) -> bool:
    """True for a folder that `save_to_disk` wrote."""
    return any((folder / name).is_file() for name in (_SET, _SPLITS))


def open_saved(folder: Path, file: str, split: str | None, on_bad: OnBad = refuse) -> Table:
    """The table of a saved data set, or of one split of a saved `DatasetDict`.

    Raises DataError if the split is missing, unnecessary or unknown, if the data set cannot be read, or if it is empty.
    """
    try:
        text = (folder / _SPLITS).read_text(encoding="utf-8") if (folder / _SPLITS).is_file() else '{"splits": []}'
        splits = json.loads(text)["splits"]
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise _unreadable(file, error) from error
    if split is not None and not splits:
        raise DataError(f"the data set in {folder} has no splits", f"Give {folder}.", file=file)
    if splits and split not in splits:
        problem = "has splits" if split is None else f"has no split {split!r}"
        raise DataError(problem, f"Give {' or '.join(f'{folder}:{name}' for name in splits)}.", file=file)
    data: Any
    try:
        from datasets import load_from_disk

        data = load_from_disk(str(folder / (split or "")), keep_in_memory=False).with_format("arrow")
        schema = data.features.arrow_schema
    except Exception as error:  # datasets raises many kinds for damaged and missing files
        raise _unreadable(file, error) from error
    if len(data) == 0:
        raise no_rows(file)
    return _arrow_table(
        file, schema, lambda columns: data.select_columns(list(columns)).iter(batch_size=_BATCH_SIZE), on_bad
    )


def _unreadable(file: str, error: Exception) -> DataError:
    problem = f"cannot be read as a saved data set ({type(error).__name__}: {first_line(error)})"
    return DataError(problem, "Save it again.", file=file)


def _arrow_table(file: str, schema: Any, batches: Batches, on_bad: OnBad) -> Table:
    """A table whose unusable columns are those that occur twice or whose type JSON does not have."""
    import pyarrow as pa

    types = dict(zip(schema.names, schema.types, strict=True))
    unusable = {name: f"has the type {type_}" for name, type_ in types.items() if not _fits_json(type_)}

    def read(columns: Sequence[str], _text: Collection[str], on_bad: OnBad) -> Rows:
        rows = _python_rows(file, batches(columns), on_bad)
        if any("arrow.json" in str(types[name]) for name in columns):
            return _decoded(rows, pa.schema([schema.field(name) for name in columns]), on_bad)
        return rows

    return Table(file=file, columns=schema.names, read=read, unusable=unusable | repeated(schema.names), on_bad=on_bad)


def _python_rows(file: str, batches: Iterable[Any], on_bad: OnBad) -> Rows:
    """The rows of all batches as Python values."""
    num_read = 0
    iterator = iter(batches)
    while True:
        try:
            batch = next(iterator, None)
        except Exception as error:  # pyarrow raises many kinds for damaged, encrypted and unsupported data
            problem = f"cannot be read after row {num_read} ({first_line(error)})"
            raise DataError(problem, "Copy it again.", file=file) from error
        if batch is None:
            return
        places = (Place(file=file, number=num_read + index, is_padded=True) for index in range(batch.num_rows))
        try:
            rows = batch.to_pylist(maps_as_pydicts="strict")
        except Exception:  # pyarrow raises many kinds; `_readable` finds the row
            yield from _readable(batch, places, on_bad)
        else:
            yield from zip(places, rows, strict=True)
        num_read += batch.num_rows


def _readable(batch: Any, places: Iterator[Place], on_bad: OnBad) -> Rows:
    """The rows of a batch that can be converted; `on_bad` takes the others."""
    for index, place in enumerate(places):
        row: dict[str, Any] = {}
        try:
            for name in batch.schema.names:
                row[name] = batch.column(name)[index].as_py(maps_as_pydicts="strict")
        except Exception as error:
            problem = "text that is not UTF-8" if isinstance(error, UnicodeDecodeError) else first_line(error)
            on_bad(place.error(problem, "Fix the value or drop the row.", column=name))
        else:
            yield place, row


def _decoded(rows: Rows, schema: Any, on_bad: OnBad) -> Rows:
    """The rows with the values of `Json` columns of `datasets`, which are stored as JSON text."""
    from datasets import Features

    features = Features.from_arrow_schema(schema)
    for place, row in rows:
        try:
            decoded = features.decode_example(row)
        except ValueError as error:
            on_bad(place.error(f"no JSON ({first_line(error)})", "Fix the value or drop the row."))
        else:
            yield place, decoded


def _fits_json(type_: Any) -> bool:
    """True for a `pyarrow.DataType` whose values JSON can hold."""
    import pyarrow.types as t

    if t.is_map(type_):
        return _is_text(type_.key_type) and _fits_json(type_.item_type)
    if t.is_dictionary(type_):
        return _fits_json(type_.value_type)
    if t.is_nested(type_):
        return not t.is_union(type_) and all(_fits_json(type_.field(index).type) for index in range(type_.num_fields))
    plain = (t.is_null, t.is_boolean, t.is_integer, t.is_floating, _is_text)
    return any(check(type_) for check in plain) or "arrow.json" in str(type_)


def _is_text(type_: Any) -> bool:
    import pyarrow.types as t

    return bool(t.is_string(type_) or t.is_large_string(type_) or t.is_string_view(type_))
