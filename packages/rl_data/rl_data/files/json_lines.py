"""JSON: one object a line, read line by line; or an array of objects, read as a whole.

Python's own parser keeps the values of the file. The readers of `datasets` and pyarrow turn texts that look like dates
into dates, and their errors name no line.
"""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

from ..errors import DataError
from .table import OnBad, Place, Rows, Table, first_line, is_unicode, no_rows, parse_json, refuse, while_opening

Open = Callable[[], AbstractContextManager[BinaryIO]]
_FIX = "Fix it or drop the row."


def open_json(open_file: Open, file: str, on_bad: OnBad = refuse) -> Table:
    """The table of a file of JSON lines or of one JSON array, which is read once to find the columns of all rows.

    Raises DataError if it has no row, and at the first line that is no JSON object unless `on_bad` takes it.
    """
    with open_file() as stream:
        is_array = _first_character(stream) == b"["
    values = partial(_array if is_array else _lines, open_file, file)
    columns: dict[str, None] = {}
    num_rows = 0
    for _, row in _objects(values, while_opening(on_bad)):
        num_rows += 1
        columns.update(dict.fromkeys(row))
    if num_rows == 0:
        raise no_rows(file)

    def read(columns: Sequence[str], _text: Collection[str], on_bad: OnBad) -> Rows:
        for place, row in _objects(values, on_bad):
            yield place, {name: row[name] for name in columns if name in row}

    return Table(file=file, columns=tuple(columns), read=read, on_bad=on_bad)


def _first_character(stream: BinaryIO) -> bytes:
    """The first byte that is neither blank nor part of a byte-order mark."""
    while chunk := stream.read(4096):
        if start := chunk.lstrip(b" \t\r\n\xef\xbb\xbf"):
            return start[:1]
    return b""


Values = Callable[[], Iterator[tuple[Place, Callable[[], tuple[Any, bool]]]]]
"""Places with functions that parse the value there, and say whether its text has escapes of Unicode."""


def _objects(values: Values, on_bad: OnBad) -> Rows:
    """The JSON objects; `on_bad` takes the errors of the others."""
    for place, parse in values():
        try:
            value, may_escape = parse()
            if not isinstance(value, dict):
                problem = f"no JSON object but {type(value).__name__}"
                raise place.error(problem, "Write one object with the columns as keys.")
            for column, item in value.items() if may_escape else ():
                if not is_unicode(json.dumps({column: item}, ensure_ascii=False)):
                    problem = "text that is not Unicode (half of a surrogate pair)"
                    raise place.error(problem, _FIX, column=ascii(column)[1:-1])
        except DataError as error:
            on_bad(error)
            continue
        yield place, value


def _lines(open_file: Open, file: str) -> Iterator[tuple[Place, Callable[[], tuple[Any, bool]]]]:
    with open_file() as stream:
        for number, line in enumerate(stream, start=1):
            if not line.isspace():
                place = Place(file=file, number=number, is_line=True)
                yield place, partial(_parsed, line, place)


def _array(open_file: Open, file: str) -> Iterator[tuple[Place, Callable[[], tuple[Any, bool]]]]:
    with open_file() as stream:
        values, may_escape = _parsed(stream.read(), Place(file=file, number=1, is_line=True))
    for number, value in enumerate(values):
        yield Place(file=file, number=number), partial(tuple, (value, may_escape))


def _parsed(data: bytes, place: Place) -> tuple[Any, bool]:
    """The JSON value of some lines that start at `place`. Raises DataError."""
    try:
        text = data.decode("utf-8-sig" if place.number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise place.error("text that is not UTF-8", "Save the file as UTF-8.") from error
    try:
        return parse_json(text.strip()), "\\u" in text
    except json.JSONDecodeError as error:
        place = replace(place, number=place.number + error.lineno - 1)
        raise place.error(f"no JSON ({error.msg} at character {error.colno})", _FIX) from error
    except ValueError as error:
        raise place.error(f"no JSON ({first_line(error)})", _FIX) from error
