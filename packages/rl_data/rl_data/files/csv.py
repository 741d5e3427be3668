"""CSV with a header, read line by line.

CSV has no types. A column whose cells are all numbers, all true or false, or all lists and objects, as JSON writes
them, has these values; any other column is text (`007` is no JSON number). An empty cell is None in every column.
"""

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, BinaryIO

from ..errors import DataError
from .table import OnBad, Place, Table, first_line, is_unicode, parse_json, refuse, repeated, while_opening

Open = Callable[[], AbstractContextManager[BinaryIO]]
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"true": True, "True": True, "false": False, "False": False}


@dataclass(frozen=True, kw_only=True)
class CsvTable(Table):
    """The records of a file; `records` reads them from the start."""

    records: Callable[[OnBad], Iterator[tuple[Place, list[str]]]]
    kinds: Mapping[str, str]
    """Columns that are not text: "number", "bool" or "json"."""

    def rows(
        self, columns: Collection[str] | None = None, *, text: Collection[str] = ()
    ) -> Iterator[tuple[Place, dict[str, Any]]]:
        kinds = {name: kind for name, kind in self.kinds.items() if name not in text or kind == "json"}
        picked = [
            (index, name, kinds.get(name, "text"))
            for index, name in enumerate(self.columns)
            if (name not in self.unusable if columns is None else name in columns)
        ]
        for place, cells in self.records(self.on_bad):
            yield place, {name: _value(cells[index], kind) for index, name, kind in picked}


def open_csv(open_file: Open, file: str, on_bad: OnBad = refuse) -> CsvTable:
    """The table of a CSV file, which is read once to find the types. Raises DataError if it has no row."""
    header, records = _header(open_file, file), lambda on_bad: _records(open_file, file, on_bad)
    kinds: list[str] = [""] * len(header)
    num_rows = 0
    for _, cells in records(while_opening(on_bad)):
        num_rows += 1
        for index, cell in enumerate(cells):
            if cell and kinds[index] != "text" and (kind := _kind(cell)) != kinds[index]:
                kinds[index] = "text" if kinds[index] else kind
    if num_rows == 0:
        raise DataError(f"{file}: the file has no rows. Give a file with at least one.", file=file)
    return CsvTable(
        file=file,
        columns=header,
        unusable=repeated(header),
        records=records,
        kinds={name: kind for name, kind in zip(header, kinds, strict=True) if kind not in ("", "text")},
        on_bad=on_bad,
    )


def _kind(cell: str) -> str:
    """What a cell that is not empty can be read as."""
    if len(cell) < 4300 and _NUMBER.fullmatch(cell):  # Python converts no longer text to an integer
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


def _header(open_file: Open, file: str) -> Sequence[str]:
    for _, cells in _all_records(open_file, file, refuse):
        return cells
    raise DataError(f"{file}: has no header. Give a CSV file whose first line names the columns.", file=file)


def _records(open_file: Open, file: str, on_bad: OnBad) -> Iterator[tuple[Place, list[str]]]:
    """The records after the header, each with one cell per column."""
    records = _all_records(open_file, file, on_bad)
    _, header = next(records)
    for place, cells in records:
        if len(cells) != len(header):
            what = f"has {len(cells)} cells, and the header {len(header)} (separated by commas)"
            on_bad(place.error(what, "Quote cells that contain commas, or fix the row."))
            continue
        yield place, cells


def _all_records(open_file: Open, file: str, on_bad: OnBad) -> Iterator[tuple[Place, list[str]]]:
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
