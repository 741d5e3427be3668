"""Step profiler: Chrome traces of selected steps (rank 0 and the loop's phases) for ui.perfetto.dev."""

import gzip
import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from .timing import PhaseTimer, Span

DRIVER_PID = 1_000_000_000
"""Process id of the phases in the trace; no real process has it."""
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_BASE = re.compile(r'"baseTimeNanoseconds"\s*:\s*(\d+)')


class TraceRecorder(Protocol):
    """Records one trace at a time, such as torch's profiler."""

    def start(self) -> None: ...

    def stop(self, path: str) -> None:
        """Writes a Chrome trace, gzipped."""


class StepProfiler:
    """Traces the given steps into `<folder>/step_000003.json.gz`; other steps have no overhead."""

    def __init__(self, recorder: TraceRecorder, folder: Path, steps: Sequence[int]) -> None:
        self._recorder, self._folder, self._steps = recorder, folder, frozenset(steps)

    @contextmanager
    def step(self, step: int, timer: PhaseTimer) -> Iterator[None]:
        """Wraps one step and its `timer`; starting and stopping the profiler is outside the step's time."""
        if step not in self._steps:
            yield
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"step_{step:06d}.json.gz"
        self._recorder.start()
        epoch_ns = time.time_ns() - round(1e9 * timer.now())
        yield
        self._recorder.stop(str(trace))
        add_phases(trace, timer.spans, epoch_ns=epoch_ns)


def add_phases(trace: Path, spans: Sequence[Span], *, epoch_ns: int) -> None:
    """Adds the phases to a trace as a separate process.

    Args:
        trace: written by `TraceRecorder.stop`; its times are microseconds since its `baseTimeNanoseconds`.
        epoch_ns: Unix time in nanoseconds when the spans' clock was 0.
    """
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        text = file.read()
    base, events = _BASE.search(text), _EVENTS.search(text)
    assert events is not None, f"{trace} is no Chrome trace"
    offset_ns = epoch_ns - (int(base[1]) if base else 0)
    added = json.dumps(phase_events(spans, offset_ns=offset_ns))[1:-1]
    with gzip.open(trace, "wt", encoding="utf-8", compresslevel=4) as file:
        file.write(f"{text[: events.end()]}\n{added},{text[events.end() :]}")


def phase_events(spans: Sequence[Span], *, offset_ns: int) -> list[dict[str, Any]]:
    """Chrome trace events of the phases: complete events (`ph: X`) of one thread, nested by time."""
    place = {"pid": DRIVER_PID, "tid": 0}
    names = [("process_name", "name", "phases of the step"), ("process_sort_index", "sort_index", -1)]
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": name, "ts": 0, **place, "args": {key: value}} for name, key, value in names
    ]
    for span in spans:
        start_ns, end_ns = (round(1e9 * seconds) for seconds in (span.start_s, span.end_s))
        times = {"ts": (start_ns + offset_ns) / 1e3, "dur": (end_ns - start_ns) / 1e3}
        events.append({"ph": "X", "cat": "phase", "name": span.name, **times, **place, "args": {}})
    return events
