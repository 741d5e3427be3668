"""JSON: one object a line, read line by line; or an array of objects, read as a whole.

Python's own parser keeps what the file says. The readers of `datasets` and pyarrow turn texts that look like dates into
dates, and their errors name no line.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from ..errors import DataError
from .table import OnBad, Place, Table, first_line, is_unicode, parse_json, refuse, while_opening

Open = Callable[[], AbstractContextManager[BinaryIO]]
_FIX = "Fix it or drop the row."


@dataclass(frozen=True, kw_only=True)
class JsonTable(Table):
    """The objects of a file; `objects` reads them from the start."""

    objects: Callable[[OnBad], Iterator[tuple[Place, dict[str, Any]]]]

    def rows(
        self, columns: Collection[str] | None = None, *, text: Collection[str] = ()
    ) -> Iterator[tuple[Place, dict[str, Any]]]:
        for place, row in self.objects(self.on_bad):
            yield place, row if columns is None else {name: row[name] for name in columns if name in row}


def open_json(open_file: Open, file: str, on_bad: OnBad = refuse) -> JsonTable:
    """The table of a file of JSON lines or of one JSON array, which is read once to find the columns of all rows.

    Raises DataError if it has no row, and at the first line that is no JSON object unless `on_bad` takes it.
    """
    with open_file() as stream:
        is_array = _first_character(stream) == b"["
    objects = _array(open_file, file) if is_array else lambda on_bad: _lines(open_file, file, on_bad)
    columns: dict[str, None] = {}
    num_rows = 0
    for _, row in objects(while_opening(on_bad)):
        num_rows += 1
        columns.update(dict.fromkeys(row))
    if num_rows == 0:
        raise DataError(f"{file}: the file has no rows. Give a file with at least one.", file=file)
    return JsonTable(file=file, columns=tuple(columns), objects=objects, on_bad=on_bad)


def _first_character(stream: BinaryIO) -> bytes:
    """The first byte that is neither blank nor part of a byte-order mark."""
    while chunk := stream.read(4096):
        if start := chunk.lstrip(b" \t\r\n\xef\xbb\xbf"):
            return start[:1]
    return b""


def _lines(open_file: Open, file: str, on_bad: OnBad) -> Iterator[tuple[Place, dict[str, Any]]]:
    with open_file() as stream:
        for number, line in enumerate(stream, start=1):
            place = Place(file=file, number=number, is_line=True)
            try:
                text = _decoded(line, place).strip()
                row = _row(_parsed(text, place), "\\u" in text, place) if text else None
            except DataError as error:
                on_bad(error)
                continue
            if row is not None:
                yield place, row


def _array(open_file: Open, file: str) -> Callable[[OnBad], Iterator[tuple[Place, dict[str, Any]]]]:
    """Parses the array now; returns what iterates over its objects."""
    with open_file() as stream:
        whole = Place(file=file, number=1, is_line=True)
        text = _decoded(stream.read(), whole)
    values, may_escape = _parsed(text, whole), "\\u" in text

    def objects(on_bad: OnBad) -> Iterator[tuple[Place, dict[str, Any]]]:
        for number, value in enumerate(values):
            place = Place(file=file, number=number)
            try:
                row = _row(value, may_escape, place)
            except DataError as error:
                on_bad(error)
                continue
            yield place, row

    return objects


def _decoded(line: bytes, place: Place) -> str:
    try:
        return line.decode("utf-8-sig" if place.number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise place.error("text that is not UTF-8", "Save the file as UTF-8.") from error


def _parsed(text: str, place: Place) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        place = replace(place, number=place.number + error.lineno - 1)
        raise place.error(f"no JSON ({error.msg} at character {error.colno})", _FIX) from error
    except ValueError as error:
        raise place.error(f"no JSON ({first_line(error)})", _FIX) from error


def _row(value: Any, may_escape: bool, place: Place) -> dict[str, Any]:
    """The object of a row. Raises DataError if it is none; `may_escape`: its text may hold half a surrogate pair."""
    if not isinstance(value, dict):
        raise place.error(f"no JSON object but {type(value).__name__}", "Write one object with the columns as keys.")
    if may_escape:
        for column, item in value.items():
            if not all(map(is_unicode, _texts({column: item}))):
                raise place.error(
                    "text that is not Unicode (half of a surrogate pair)", _FIX, column=ascii(column)[1:-1]
                )
    return value


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value, also those of keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (key, *_texts(item))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
