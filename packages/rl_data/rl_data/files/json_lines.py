"""JSON: one object a line, read line by line; or an array of objects, read as a whole.

Python's own parser keeps the values of the file. The readers of `datasets` and pyarrow turn texts that look like dates
into dates, and their errors name no line.
"""

import json
from collections.abc import Collection, Sequence
from typing import Any

from ..errors import DataError
from .table import OnBad, Open, Place, Rows, Table, first_line, is_unicode, no_rows, parse_json

_FIX = "Fix it or drop the row."


def open_json(open_file: Open, file: str) -> Table:
    """The table of a file of JSON lines or of one JSON array, which is read once to find the columns of all rows.

    Raises DataError if it has no row.
    """
    with open_file() as stream:
        values = _array if stream.read(4096).lstrip(b" \t\r\n\xef\xbb\xbf")[:1] == b"[" else _lines
    columns, errors, num_rows = dict[str, None](), list[DataError](), 0
    for _, row in values(open_file, file, errors.append):
        num_rows += 1
        columns.update(dict.fromkeys(row))
    if num_rows == 0:
        raise errors[0] if errors else no_rows(file)

    def read(columns: Sequence[str], _text: Collection[str], on_bad: OnBad) -> Rows:
        for place, row in values(open_file, file, on_bad):
            yield place, {name: row[name] for name in columns if name in row}

    return Table(file=file, columns=tuple(columns), read=read)


def _lines(open_file: Open, file: str, on_bad: OnBad) -> Rows:
    with open_file() as stream:
        for number, line in enumerate(stream, start=1):
            place = Place(file=file, number=number, is_line=True)
            try:
                row = None if line.isspace() else _object(place, _parsed(line, place))
            except DataError as error:
                on_bad(error)
                continue
            if row is not None:
                yield place, row


def _array(open_file: Open, file: str, on_bad: OnBad) -> Rows:
    with open_file() as stream:
        values = _parsed(stream.read(), Place(file=file, number=1, is_line=True))
    for number, value in enumerate(values):
        place = Place(file=file, number=number)
        try:
            yield place, _object(place, value)
        except DataError as error:
            on_bad(error)


def _object(place: Place, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise place.error(f"no JSON object but {type(value).__name__}", "Write one object with the columns as keys.")
    return value


def _parsed(data: bytes, place: Place) -> Any:
    """The JSON value of some lines that start at `place`. Raises DataError."""
    try:
        text = data.decode("utf-8-sig" if place.number == 1 else "utf-8")
        value = parse_json(text.strip())
    except UnicodeDecodeError as error:
        raise place.error("text that is not UTF-8", "Save the file as UTF-8.") from error
    except json.JSONDecodeError as error:
        place = Place(file=place.file, number=place.number + error.lineno - 1, is_line=True)
        raise place.error(f"no JSON ({error.msg} at character {error.colno})", _FIX) from error
    except ValueError as error:
        raise place.error(f"no JSON ({first_line(error)})", _FIX) from error
    if "\\u" in text and not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise place.error("text that is not Unicode (half of a surrogate pair)", _FIX)
    return value
