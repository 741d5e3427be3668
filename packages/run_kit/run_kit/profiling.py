"""Step profiler: one Chrome trace a step, of the loop's phases and every traced process, for ui.perfetto.dev.

torch writes a trace for each process: times since a base that all processes of a host share, device numbers as process
ids of GPUs, flow ids that count from 0. In one file these ids are made distinct, and every process gets a name.
"""

import gzip
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from .timing import PhaseTimer, Span

DRIVER_PID = 1_000_000_000
"""Process id of the phases in the trace; no real process has it."""
_STRIDE = 10_000_000
"""Distance of the ids of two traces; process ids of Linux are below it."""


class TraceRecorder(Protocol):
    """Records one trace of each of its processes at a time, such as torch's profiler."""

    def start(self) -> None: ...

    def stop(self, folder: Path) -> Mapping[str, Path]:
        """Writes a gzipped Chrome trace for each process; name of the process -> file in `folder`."""


class StepProfiler:
    """Traces the given steps into `<folder>/step_000003.json.gz`; other steps have no overhead."""

    def __init__(self, recorders: Sequence[TraceRecorder], folder: Path, steps: Sequence[int]) -> None:
        self._recorders, self._folder, self._steps = recorders, folder, frozenset(steps)

    @contextmanager
    def step(self, step: int, timer: PhaseTimer) -> Iterator[None]:
        """Wraps one step and its `timer`; starting and stopping the profilers is outside the step's time."""
        if step not in self._steps:
            yield
            return
        parts = self._folder / f"step_{step:06d}_parts"
        parts.mkdir(parents=True, exist_ok=True)
        with ExitStack() as cleanup:
            cleanup.callback(shutil.rmtree, parts, ignore_errors=True)
            for recorder in self._recorders:
                recorder.start()
            epoch_ns = time.time_ns() - round(1e9 * timer.now())
            yield
            traces = {name: path for recorder in self._recorders for name, path in recorder.stop(parts).items()}
            merge_traces(self._folder / f"step_{step:06d}.json.gz", traces, timer.spans, epoch_ns=epoch_ns)


def merge_traces(target: Path, traces: Mapping[str, Path], spans: Sequence[Span], *, epoch_ns: int) -> None:
    """Writes one trace of all processes, with the phases as a process of their own.

    Args:
        traces: name of each process -> its gzipped trace, with times in microseconds since its `baseTimeNanoseconds`.
        epoch_ns: Unix time in nanoseconds when the spans' clock was 0.
    """
    base_ns, events = None, []
    for number, (name, path) in enumerate(traces.items(), start=1):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            trace = json.load(file)
        own_base_ns = trace.get("baseTimeNanoseconds", 0)
        if base_ns is None:
            base_ns = own_base_ns
            events += phase_events(spans, offset_ns=epoch_ns - base_ns)
        shift_us = (own_base_ns - base_ns) / 1e3
        for event in trace["traceEvents"]:
            # Ids that no other trace has, times of the common clock, and processes with a name.
            ids = {key: event[key] + number * _STRIDE for key in ("pid", "id") if isinstance(event.get(key), int)}
            label = {"args": {"name": name}} if event.get("name") == "process_name" else {}
            events.append(event | ids | label | ({"ts": event["ts"] + shift_us} if "ts" in event else {}))
    with gzip.open(target, "wt", encoding="utf-8", compresslevel=4) as out:
        json.dump({"baseTimeNanoseconds": base_ns, "displayTimeUnit": "ms", "traceEvents": events}, out)


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
