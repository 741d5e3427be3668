"""Rows on disk between reading and writing: Arrow tables, and one file per key, so that memory stays bounded."""

import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..files.table import Place, first_line

_TEXTS = ("question", "answer", "ground_truth", "data_source")


class Spool:
    """Rows in the order in which they were added, each with its keys."""

    def __init__(self, folder: Path) -> None:
        """`folder` is empty."""
        self._folder = folder
        self._num_tables = 0
        self._dtypes: dict[str, np.dtype[Any]] = {}
        self.num_rows = 0
        self.schema: Any = None
        """The `pyarrow.Schema` that all rows fit."""

    def add(self, records: Sequence[Mapping[str, Any]], places: Sequence[Place], keys: Mapping[str, Any]) -> None:
        """Append rows and their keys, each an array [number of rows].

        Raises DataError for values that do not fit one type of a column, such as text and numbers.
        """
        import pyarrow as pa

        names = dict.fromkeys(name for record in records for name in record)
        table = pa.table({name: _column(name, [row.get(name) for row in records], places) for name in names})
        try:
            schemas = [table.schema] if self.schema is None else [self.schema, table.schema]
            self.schema = pa.unify_schemas(schemas, promote_options="permissive")
        except (pa.ArrowException, ValueError) as error:
            raise _other_types(f"{places[0].file}: from {places[0].number} on", error) from error
        compressed = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_file(self._path(self._num_tables), table.schema, options=compressed) as writer:
            writer.write_table(table)
        for name, values in keys.items():
            self._dtypes[name] = values.dtype
            with (self._folder / f"{name}.keys").open("ab") as stream:
                values.tofile(stream)
        self._num_tables += 1
        self.num_rows += len(records)

    def keys(self, name: str) -> NDArray[Any]:
        """One key of all rows."""
        return np.fromfile(self._folder / f"{name}.keys", self._dtypes[name])

    def tables(self, schema: Any) -> Iterator[Any]:
        """The rows as `pyarrow.Table`s of a schema whose columns `self.schema` has; deleted from the disk as read."""
        import pyarrow as pa

        for number in range(self._num_tables):
            with pa.OSFile(str(self._path(number))) as stream:
                table = pa.ipc.open_file(stream).read_all()
            yield fitted(table, schema)
            os.unlink(self._path(number))

    def _path(self, number: int) -> str:
        return str(self._folder / f"{number}.arrow")


def _column(name: str, values: list[Any], places: Sequence[Place]) -> Any:
    """A `pyarrow.Array`. Raises DataError at the first value of another type."""
    import pyarrow as pa

    def convert(num_values: int) -> Any:
        try:
            return pa.array(values[:num_values], pa.string() if name in _TEXTS else None)
        except (pa.ArrowException, OverflowError, ValueError, TypeError) as error:
            return error

    found = convert(len(values))
    if isinstance(found, Exception):
        # A list can be converted only if each of its beginnings can.
        row = bisect_left(range(1, len(values)), True, key=lambda count: isinstance(convert(count), Exception))
        raise _other_types(str(places[row]), found, name)
    return found


def fitted(table: Any, schema: Any) -> Any:
    """The table with all columns of the schema, in its order and of its types."""
    import pyarrow as pa

    columns = [
        table[field.name].cast(field.type) if field.name in table.column_names else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def storable(schema: Any) -> Any:
    """The schema without columns that are empty in every row, which parquet may not store."""
    import pyarrow as pa

    return pa.schema([field for field in schema if not _is_empty(field.type)])


def _is_empty(type_: Any) -> bool:
    import pyarrow.types as t

    return bool(t.is_null(type_)) or (
        bool(t.is_struct(type_)) and all(_is_empty(type_.field(index).type) for index in range(type_.num_fields))
    )


def _other_types(where: str, error: Exception, column: str | None = None) -> DataError:
    of = "" if column is None else f", column {column!r}"
    return DataError(
        f"{where}{of}: values of different types ({first_line(error)}), which parquet cannot store in one column. "
        "Write them as text, or leave the column out: --extra-columns names those to keep.",
        column=column,
    )
