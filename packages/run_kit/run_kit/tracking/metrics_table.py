"""`metrics.tsv`: one row per step, tab-separated, readable during the run."""

import errno
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import RunFolderError, TrackingError


def is_disk_full(error: OSError) -> bool:
    """True if the disk is full, or a quota or the limit of a file's size is reached."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Context that writes `path`. Raises RunFolderError, which names it."""
    try:
        yield
    except OSError as error:
        problem, remedy = f"cannot be written: {error.strerror or error}", None
        if is_disk_full(error):
            problem += f"; {shutil.disk_usage(path.parent).free:,} bytes are free"
            remedy = "free some space on that disk"
        raise RunFolderError(problem, field=str(path), remedy=remedy) from error


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a file so that readers see the old or the new content, never a part.

    A lone surrogate, which a tokenizer can produce and UTF-8 cannot hold, is written as its escape, as in JSON.

    Raises:
        RunFolderError: the file cannot be written; an old one is unchanged.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming_file(path):
            temporary.write_bytes(data)
            os.replace(temporary, path)
    except RunFolderError:
        with suppress(OSError):
            temporary.unlink()
        raise


def as_number(name: str, value: Any) -> float | int:
    """A metric as a Python number: int, float, bool, numpy scalars and tensors of one value.

    Raises:
        TrackingError: a metric name that breaks the table, or a value that is no number.
    """
    if not name or name == "step" or any(c in name for c in "\t\n\r"):
        allowed = "a metric's name, not 'step' (the table's own column), without tabs and line breaks"
        raise TrackingError(field="name", value=name, allowed=allowed)
    if hasattr(value, "item") and not isinstance(value, (int, float)):
        with suppress(ValueError, RuntimeError):  # several numbers
            value = value.item()
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (int, float)):
        return value
    raise TrackingError(field=name, value=repr(value), allowed="one number")


class MetricsTable:
    """The metrics of a run, in memory and in a tab-separated file.

    The first column is `step`; the others come in the order in which they first appeared. A metric that appears later
    gets a column at the end: the file is rewritten with the longer header, and earlier rows stay empty there. Logging
    the same step again adds to its row. An existing file is continued.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: list[str] = []
        self._rows: dict[int, dict[str, float | int]] = {}
        self._rewrite = False
        if path.exists():
            self._read()

    @property
    def columns(self) -> tuple[str, ...]:
        """Metric names, without `step`."""
        return tuple(self._columns)

    @property
    def steps(self) -> tuple[int, ...]:
        """Logged steps, ascending."""
        return tuple(self._rows)

    def row(self, step: int) -> dict[str, float | int]:
        """Metrics of one step."""
        return dict(self._rows[step])

    def series(self, name: str, *, gaps: bool = False) -> tuple[list[int], list[float]]:
        """Steps and finite values of a metric; steps without it are left out.

        With `gaps`, values that are not finite are nan instead of left out, to break a line there; empty if no value is
        finite.
        """
        pairs = [(step, float(row[name])) for step, row in self._rows.items() if name in row]
        finite = [(step, value) for step, value in pairs if math.isfinite(value)]
        if gaps and finite:
            finite = [(step, value if math.isfinite(value) else math.nan) for step, value in pairs]
        return [step for step, _ in finite], [value for _, value in finite]

    def aligned(self, names: Sequence[str]) -> tuple[list[int], list[list[float]]]:
        """Steps that have any of these metrics, and the values of each metric at them, 0 where it is missing."""
        series = [dict(zip(*self.series(name), strict=True)) for name in names]
        steps = sorted({step for by_step in series for step in by_step})
        return steps, [[by_step.get(step, 0.0) for step in steps] for by_step in series]

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics to the row of a step and to the file.

        Raises:
            TrackingError: a step before the last one, or a metric that is no number.
        """
        if isinstance(step, bool) or not isinstance(step, int):
            raise TrackingError(field="step", value=step, allowed="an integer")
        last = next(reversed(self._rows), None)
        if last is not None and step < last:
            raise TrackingError(
                field="step", value=step, allowed=f"{last} or more: steps are logged in ascending order"
            )
        numbers = {name: as_number(name, value) for name, value in metrics.items()}
        new = [name for name in numbers if name not in self._columns]
        known_step = step in self._rows
        self._columns += new
        self._rows.setdefault(step, {}).update(numbers)
        if new or known_step or self._rewrite or not self.path.exists():
            atomic_write(self.path, self._text())
            self._rewrite = False
        else:
            with naming_file(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(self._line(step))

    def truncate_from(self, step: int) -> None:
        """Remove this step and all later ones, for a run that resumes before them."""
        kept = {number: row for number, row in self._rows.items() if number < step}
        if len(kept) != len(self._rows):
            self._rows = kept
            atomic_write(self.path, self._text())

    def _line(self, step: int) -> str:
        cells = [self._rows[step].get(name, "") for name in self._columns]
        # Nine digits are exact for float32.
        return "\t".join(f"{cell:.9g}" if isinstance(cell, float) else str(cell) for cell in (step, *cells)) + "\n"

    def _text(self) -> str:
        return "\t".join(["step", *self._columns]) + "\n" + "".join(self._line(step) for step in self._rows)

    def _read(self) -> None:
        *lines, rest = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        # A run killed while writing a row leaves a row without a line end: drop it.
        self._rewrite = bool(rest)
        header = lines[0].split("\t") if lines else []
        if header[:1] != ["step"]:
            raise TrackingError("not a metrics table; its first column must be 'step'", field=str(self.path))
        self._columns = header[1:]
        for number, line in enumerate(lines[1:], start=2):
            cells = line.split("\t")
            try:
                values = [_parse_number(cell) for cell in cells[1:]]
                step = int(cells[0])
            except ValueError:
                raise TrackingError("a cell is not a number", field=f"{self.path}, line {number}") from None
            if len(cells) != len(header):
                problem = f"{len(cells)} cells, the header has {len(header)}"
                raise TrackingError(problem, field=f"{self.path}, line {number}")
            self._rows[step] = {
                name: value for name, value in zip(self._columns, values, strict=True) if value is not None
            }


def columns_of(tables: Iterable[MetricsTable]) -> list[str]:
    """Metric names of several tables, each once, in the order of their first appearance."""
    return list(dict.fromkeys(name for table in tables for name in table.columns))


def _parse_number(cell: str) -> float | int | None:
    if cell == "":
        return None
    return int(cell) if re.fullmatch("-?[0-9]{1,18}", cell) else float(cell)
