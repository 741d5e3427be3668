"""CSV with a header, read by pyarrow.

CSV has no types, and pyarrow's guesses turn `007` into 7 and texts into dates. A column whose cells are all numbers,
true or false, lists or objects, as JSON writes them, has these values; any other column is text. An empty cell is None.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ..errors import DataError
from .arrow import batches_of
from .table import OnBad, Open, Place, Rows, Table, no_rows, parse_json

_VALUE = re.compile(r"-?[0-9]|[\[{]")
_WORDS = {"true": True, "True": True, "false": False, "False": False}
_BLOCK_BYTES = 1 << 23  # no row may be longer


def open_csv(open_file: Open, file: str) -> Table:
    """The table of a CSV file, which is read once to find the types. Raises DataError if it has no row."""
    with open_file() as stream:  # pyarrow takes the rest of the file for one cell after a quote that is not closed
        if sum(block.count(b'"') for block in iter(lambda: stream.read(_BLOCK_BYTES), b"")) % 2:
            raise DataError("has a quote that is not closed", "Write a quote inside a quoted cell twice.", file=file)
    first, _ = next(batches_of(file, _blocks(open_file, (), {})))
    header: list[str] = first.schema.names
    errors, texts, num_rows = list[DataError](), set[str](), 0
    for _, row in _rows(open_file, file, header, errors.append):
        num_rows += 1
        texts |= {name for name, cell in row.items() if cell and name not in texts and _value(cell) is None}
    if num_rows == 0:
        raise errors[0] if errors else no_rows(file)

    def read(columns: Sequence[str], text: Collection[str], on_bad: OnBad) -> Rows:
        for place, row in _rows(open_file, file, header, on_bad):
            values = {name: row[name] if name in texts else _value(row[name]) for name in columns}
            # A number in a text column stays as it is written; a list of messages is a value there too.
            plain = {name: row[name] for name in columns if name in text and not isinstance(values[name], list | dict)}
            yield place, values | plain

    return Table(file=file, columns=header, read=read)


def _value(cell: str | None) -> Any:
    """The value that JSON text, True or False stands for; None for any other text."""
    if cell in _WORDS or cell is None:
        return _WORDS.get(cell or "")
    try:
        return parse_json(cell) if _VALUE.match(cell) else None
    except ValueError:
        return None


def _rows(open_file: Open, file: str, header: Sequence[str], on_bad: OnBad) -> Rows:
    """The rows as texts; `on_bad` takes the errors of those with another number of cells than the header."""
    bad: dict[int, int] = {}
    number = 0
    for _, rows in batches_of(file, _blocks(open_file, header, bad)):
        for row in (*rows, None):
            while number in bad:
                problem = f"has {bad[number]} cells, and the header {len(header)} (separated by commas)"
                error = Place(file=file, number=number).error(problem, "Quote cells that contain commas.")
                number += 1
                on_bad(error)
            if row is not None:
                yield Place(file=file, number=number), row
                number += 1


def _blocks(open_file: Open, header: Sequence[str], bad: dict[int, int]) -> Iterator[Any]:
    """The rows as `pyarrow.RecordBatch`es of texts; rows with another number of cells are added to `bad`."""
    import pyarrow as pa
    from pyarrow import csv

    def skip(row: csv.InvalidRow) -> str:
        bad[row.number - 2] = row.actual_columns  # pyarrow counts the header as row 1
        return "skip"

    texts = {"strings_can_be_null": True, "null_values": [""], "column_types": dict.fromkeys(header, pa.string())}
    with open_file() as stream:
        reading = csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES)
        parsing = csv.ParseOptions(newlines_in_values=True, invalid_row_handler=skip)
        reader = csv.open_csv(stream, reading, parsing, csv.ConvertOptions(**texts))
        yield pa.RecordBatch.from_pylist([], reader.schema)  # of the header, if there is no other
        yield from reader
