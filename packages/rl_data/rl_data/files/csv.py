"""CSV with a header, read line by line.

CSV has no types. A column whose cells are all numbers, all true or false, or all lists and objects, as JSON writes
them, has these values; any other column is text (`007` is no JSON number). An empty cell is None in every column.

Python's own parser is used: pyarrow's takes the rest of a file for one cell after a quote that is not closed, and
knows no lines.
"""

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, BinaryIO

from ..errors import DataError
from .table import (
    OnBad,
    Place,
    Rows,
    Table,
    first_line,
    is_unicode,
    no_rows,
    parse_json,
    refuse,
    repeated,
    while_opening,
)

Open = Callable[[], AbstractContextManager[BinaryIO]]
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_MAX_NUMBER = 4300
"""Characters of the longest integer that Python converts."""
_WORDS = {"true": True, "True": True, "false": False, "False": False}


def open_csv(open_file: Open, file: str, on_bad: OnBad = refuse) -> Table:
    """The table of a CSV file, which is read once to find the types. Raises DataError if it has no row."""
    _, header = next(_records(open_file, file, refuse), (None, None))
    if header is None:
        raise DataError("has no header", "Give a CSV file whose first line names the columns.", file=file)
    kinds = [""] * len(header)
    num_rows = 0
    for _, cells in _rows(open_file, file, while_opening(on_bad)):
        num_rows += 1
        for index, cell in enumerate(cells):
            if cell and kinds[index] != "text" and (kind := _kind(cell)) != kinds[index]:
                kinds[index] = "text" if kinds[index] else kind
    if num_rows == 0:
        raise no_rows(file)

    def read(columns: Sequence[str], text: Collection[str], on_bad: OnBad) -> Rows:
        # A number in a text column stays as it is written; a list of messages is a value there too.
        kept = [
            (index, name, "text" if name in text and kinds[index] != "json" else kinds[index])
            for index, name in enumerate(header)
            if name in columns
        ]
        for place, cells in _rows(open_file, file, on_bad):
            yield place, {name: _value(cells[index], kind) for index, name, kind in kept}

    return Table(file=file, columns=header, read=read, unusable=repeated(header), on_bad=on_bad)


def _kind(cell: str) -> str:
    """The kind of values that a cell, which is not empty, may be one of."""
    if len(cell) < _MAX_NUMBER and _NUMBER.fullmatch(cell):
        return "number"
    if cell in _WORDS:
        return "bool"
    if cell[0] in "[{":
        try:
            parse_json(cell)
        except ValueError:
            return "text"
        return "json"
    return "text"


def _value(cell: str, kind: str) -> Any:
    if not cell:
        return None
    if kind == "text":
        return cell
    return _WORDS[cell] if kind == "bool" else json.loads(cell)


def _rows(open_file: Open, file: str, on_bad: OnBad) -> Iterator[tuple[Place, list[str]]]:
    """The records after the header, each with one cell per column."""
    records = _records(open_file, file, on_bad)
    _, header = next(records)
    for place, cells in records:
        if len(cells) != len(header):
            problem = f"has {len(cells)} cells, and the header {len(header)} (separated by commas)"
            on_bad(place.error(problem, "Quote cells that contain commas, or fix the row."))
            continue
        yield place, cells


def _records(open_file: Open, file: str, on_bad: OnBad) -> Iterator[tuple[Place, list[str]]]:
    """The records with the lines at which they start, the header among them; blank lines are left out.

    Wrong quotes always raise: nobody knows where the next record starts.
    """
    csv.field_size_limit(sys.maxsize)  # Python's own limit, 131072 characters, is for all readers of the process
    with open_file() as stream:
        # Bytes that are not UTF-8 become half surrogate pairs, so that the error can name their line.
        lines = csv.reader(io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline=""), strict=True)
        while True:
            place = Place(file=file, number=lines.line_num + 1, is_line=True)
            try:
                cells = next(lines, None)
            except csv.Error as error:
                remedy = "Fix the quotes: a quote inside a quoted cell is written twice."
                raise place.error(f"no CSV ({first_line(error)})", remedy) from error
            if cells is None:
                return
            if not all(map(is_unicode, cells)):
                on_bad(place.error("text that is not UTF-8", "Save the file as UTF-8."))
            elif cells:
                yield place, cells
