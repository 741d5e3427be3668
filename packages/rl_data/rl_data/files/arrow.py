"""Tables of Arrow data, which parquet files and saved data sets hold."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import DataError
from .table import OnBad, Place, Table, first_line, parse_json, refuse, repeated

BATCH_SIZE = 4096
"""Rows converted to Python in one call."""
Batches = Callable[[Sequence[str]], Iterable[Any]]
"""The data of some columns as `pyarrow.RecordBatch` or `pyarrow.Table` of at most `BATCH_SIZE` rows."""


@dataclass(frozen=True, kw_only=True)
class ArrowTable(Table):
    """A table with a schema (`pyarrow.Schema`) and batches."""

    schema: Any
    batches: Batches

    def rows(
        self, columns: Collection[str] | None = None, *, text: Collection[str] = ()
    ) -> Iterator[tuple[Place, dict[str, Any]]]:
        names = [name for name in self.columns if (name not in self.unusable if columns is None else name in columns)]
        as_json = [name for name in names if has_json(self.schema.field(name).type)]
        num_read = 0
        for batch in self._batches(names):
            for index, row in self._to_python(batch, num_read):
                place = Place(file=self.file, number=num_read + index)
                try:
                    parsed = {name: _parsed(row[name], self.schema.field(name).type, place, name) for name in as_json}
                except DataError as error:
                    self.on_bad(error)
                    continue
                yield place, {**row, **parsed} if parsed else row
            num_read += batch.num_rows

    def _batches(self, columns: Sequence[str]) -> Iterator[Any]:
        num_read = 0
        try:
            for batch in self.batches(columns):
                yield batch
                num_read += batch.num_rows
        except DataError:
            raise
        except Exception as error:  # pyarrow raises many kinds for damaged, encrypted and unsupported data
            what = f"{self.file}: cannot be read after row {num_read} ({first_line(error)}). Copy it again."
            raise DataError(what, file=self.file) from error

    def _to_python(self, batch: Any, num_read: int) -> list[tuple[int, dict[str, Any]]]:
        """The rows of a batch as Python values, with their positions in it."""
        try:
            return list(enumerate(batch.to_pylist(maps_as_pydicts="strict")))
        except Exception:  # pyarrow raises many kinds; the row is found below
            return list(self._readable(batch, num_read))

    def _readable(self, batch: Any, num_read: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """The rows of a batch that can be converted one by one; `on_bad` takes the others."""
        for index in range(batch.num_rows):
            row, place = {}, Place(file=self.file, number=num_read + index)
            try:
                for name in batch.schema.names:
                    row[name] = _to_python(batch.column(name)[index], place, name)
            except DataError as error:
                self.on_bad(error)
                continue
            yield index, row


def _to_python(value: Any, place: Place, column: str) -> Any:
    """The Python value of a `pyarrow.Scalar`. Raises DataError if it has none."""
    try:
        return value.as_py(maps_as_pydicts="strict")
    except Exception as error:
        what = "text that is not UTF-8" if isinstance(error, UnicodeDecodeError) else first_line(error)
        raise place.error(what, "Fix the value or drop the row.", column=column) from error


def arrow_table(file: str, schema: Any, batches: Batches, on_bad: OnBad = refuse) -> ArrowTable:
    """A table whose unusable columns are those that occur twice or whose type JSON does not have."""
    columns = schema.names
    types = {
        name: f"has the type {type_}" for name, type_ in zip(columns, schema.types, strict=True) if not fits(type_)
    }
    return ArrowTable(
        file=file,
        columns=columns,
        unusable=types | repeated(columns),
        on_bad=on_bad,
        schema=schema,
        batches=batches,
    )


def fits(type_: Any) -> bool:
    """Whether JSON can hold the values of a `pyarrow.DataType`."""
    import pyarrow.types as t

    if t.is_map(type_):
        return _is_text(type_.key_type) and fits(type_.item_type)
    if t.is_dictionary(type_):
        return fits(type_.value_type)
    if t.is_nested(type_):
        return not t.is_union(type_) and all(fits(type_.field(index).type) for index in range(type_.num_fields))
    plain = (t.is_null, t.is_boolean, t.is_integer, t.is_floating, _is_text, _is_json)
    return any(check(type_) for check in plain)


def has_json(type_: Any) -> bool:
    """Whether a type has values stored as JSON text: a `Json` column of `datasets`."""
    import pyarrow.types as t

    return _is_json(type_) or (
        t.is_nested(type_) and any(has_json(type_.field(index).type) for index in range(type_.num_fields))
    )


def _is_text(type_: Any) -> bool:
    import pyarrow.types as t

    return bool(t.is_string(type_) or t.is_large_string(type_) or t.is_string_view(type_))


def _is_json(type_: Any) -> bool:
    return getattr(type_, "extension_name", "") == "arrow.json"


def _parsed(value: Any, type_: Any, place: Place, column: str) -> Any:
    """A value with the JSON texts in it parsed. Raises DataError if one is not JSON."""
    import pyarrow.types as t

    if value is None or not has_json(type_):
        return value
    if _is_json(type_):
        try:
            return parse_json(value)
        except ValueError as error:
            raise place.error(
                f"no JSON ({first_line(error)})", "Fix the value or drop the row.", column=column
            ) from error
    if t.is_struct(type_):
        return {name: _parsed(item, type_.field(name).type, place, column) for name, item in value.items()}
    if t.is_map(type_):
        return {name: _parsed(item, type_.item_type, place, column) for name, item in value.items()}
    return [_parsed(item, type_.value_type, place, column) for item in value]
