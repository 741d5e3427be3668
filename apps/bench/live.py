"""Live table of the cases: redrawn in place on a terminal, one line per change elsewhere."""

import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from apps.bench.plan import Case
from apps.bench.results import CaseResult
from run_kit.tracking.progress import duration_text

_COLUMNS = ("case", "status", "step", "score", "tok/s", "s/step", "GB", "wall")


def table_lines(cases: Sequence[Case], reached: Mapping[str, CaseResult]) -> list[str]:
    """Header and one line per case, aligned; GB is the peak of a rank on GPUs and of the host on the CPU."""
    rows = [_COLUMNS, *(_cells(case, reached.get(case.name, CaseResult())) for case in cases)]
    columns = []
    for number, cells in enumerate(zip(*rows, strict=True)):
        align, width = "<" if number < 2 else ">", max(map(len, cells))
        columns.append([f"{cell:{align}{width}}" for cell in cells])
    return ["  ".join(row) for row in zip(*columns, strict=True)]


def _cells(case: Case, found: CaseResult) -> tuple[str, ...]:
    retried = f" (attempt {found.attempts})" if found.attempts > 1 else ""
    memory = found.peak_reserved_gb if found.peak_reserved_gb == found.peak_reserved_gb else found.peak_host_gib
    return (
        case.name,
        found.status + retried,
        f"{found.last_step}/{case.steps}",
        _short(found.score, "{:.3f}"),
        _short(found.throughput, "{:,.0f}"),
        _short(found.step_s, "{:.2f}"),
        _short(memory, "{:.2f}"),
        duration_text(found.wall_s) if found.wall_s == found.wall_s else "",
    )


def _short(value: float, form: str) -> str:
    return form.format(value) if value == value else ""  # nan: not measured


class LiveTable:
    """Shows the cases. Without a terminal it prints a line per change of a case, at most twice a minute.

    Args:
        stream: output stream; None is stdout.
        clock: monotonic seconds; for tests.
    """

    def __init__(
        self, cases: Sequence[Case], *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cases = {case.name: case for case in cases}
        self.reached: dict[str, CaseResult] = {}
        self._stream = stream or sys.stdout
        self._clock = clock
        self._num_drawn = 0
        self._printed: dict[str, tuple[CaseResult, float]] = {}

    def update(self, name: str, reached: CaseResult) -> None:
        """Update the progress of a case."""
        self.reached[name] = reached
        if self._stream.isatty():
            self._draw()
        else:
            self._print(name, reached)

    def close(self) -> None:
        """Print the final table if there is no terminal."""
        if not self._stream.isatty():
            self._write(self._lines())

    def _lines(self) -> list[str]:
        return table_lines(list(self._cases.values()), self.reached)

    def _write(self, lines: Sequence[str]) -> None:
        self._stream.write("".join(f"{line}\n" for line in lines))
        self._stream.flush()

    def _draw(self) -> None:
        lines = self._lines()
        up = f"\x1b[{self._num_drawn}F" if self._num_drawn else ""
        width = shutil.get_terminal_size().columns - 1  # a wrapped line would not be overwritten
        self._stream.write(up)
        self._write([f"\x1b[2K{line[:width]}" for line in lines])
        self._num_drawn = len(lines)

    def _print(self, name: str, reached: CaseResult) -> None:
        now, before = self._clock(), self._printed.get(name)
        if before is not None:
            earlier, printed_at = before
            same = (earlier.status, earlier.attempts) == (reached.status, reached.attempts)
            if same and (earlier.last_step == reached.last_step or now - printed_at < 30):
                return
        self._printed[name] = (reached, now)
        self._write(table_lines([self._cases[name]], {name: reached})[1:])
