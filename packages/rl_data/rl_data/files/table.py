"""Tables: columns, and rows whose places users can look up. Every reader of files returns one."""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from ..errors import DataError


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a row: a line, counted from 1, in text files; a row, counted from 0, in all others."""

    file: str
    number: int
    is_line: bool = False
    is_padded: bool = False
    """Structs of the row have the fields of all rows, as in Arrow: a null may be a field that the row does not have."""

    def __str__(self) -> str:
        return self.error("", "").place

    def error(self, problem: str, remedy: str, *, column: str | None = None, setting: str | None = None) -> DataError:
        """A DataError for this row, or for one column of it."""
        place = {"file": self.file, "row": self.number, "is_line": self.is_line}
        return DataError(problem, remedy, **place, column=column, setting=setting)  # type: ignore[arg-type]


Open = Callable[[], AbstractContextManager[BinaryIO]]
OnBad = Callable[[DataError], None]
"""Called with the error of a row that cannot be read; when it returns, reading continues after that row."""
Rows = Iterator[tuple[Place, dict[str, Any]]]


def refuse(error: DataError) -> None:
    """The default `OnBad`: the first row that cannot be read ends the reading."""
    raise error


@dataclass(frozen=True, kw_only=True)
class Table:
    """An opened file with at least one row. Rows are read one batch at a time, each time from the start."""

    file: str
    columns: Sequence[str]
    """The columns in the order of the file; a row of JSON lines may lack some."""
    read: Callable[[Sequence[str], Collection[str], OnBad], Rows]
    """(columns, columns whose numbers stay text, on_bad) -> rows."""
    unusable: Mapping[str, str] = field(default_factory=dict)
    """Columns that cannot be read as JSON values, with the reason."""
    on_bad: OnBad = refuse

    def rows(self, columns: Collection[str] | None = None, *, text: Collection[str] = ()) -> Rows:
        """The rows as JSON values, and other Python values in columns that are named and `unusable`.

        Raises DataError for damaged data, and for an unreadable row unless `on_bad` takes it.

        Args:
            columns: those to read; None for all that are usable.
            text: columns whose numbers stay text where the file does not tell them apart (CSV).
        """
        if columns is None:
            columns = set(self.columns) - set(self.unusable)
        return self.read([name for name in self.columns if name in columns], text, self.on_bad)

    def require(self, columns: Collection[str], remedy: str, *, setting: str | None = None) -> None:
        """Raises DataError, naming the columns that there are, if one of `columns` is missing or occurs twice."""
        for column in columns:
            if column not in self.columns:
                problem = f"column {column!r} is missing; the columns found are {', '.join(self.columns)[:1000]}"
                raise DataError(problem, remedy, file=self.file, column=column, setting=setting)
            if (count := self.columns.count(column)) > 1:
                problem = f"column {column!r} occurs {count} times"
                raise DataError(problem, "Rename or drop all but one.", file=self.file, column=column)


def no_rows(file: str) -> DataError:
    """The error of a file without rows."""
    return DataError("the file has no rows", "Give a file with at least one.", file=file)


def why_not_json(value: Any) -> str:
    """The reason why JSON cannot hold a value; empty if it can."""
    if isinstance(value, str):
        return "" if is_unicode(value) else "text that is not Unicode"
    if value is None or isinstance(value, int):
        return ""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"the number {value}"
    if isinstance(value, list | dict):
        items = value.values() if isinstance(value, dict) else value
        return next(filter(None, map(why_not_json, items)), "")
    return f"a value of type {type(value).__name__}"


def is_unicode(text: str) -> bool:
    """False for text with half of a surrogate pair, which no tokenizer takes."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_json(text: str) -> Any:
    """The JSON value of a text. Raises ValueError, also for nesting without end."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def first_line(error: BaseException) -> str:
    """The first line of an error's text, shortened."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
