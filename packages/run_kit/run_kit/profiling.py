"""Step profiler: one Chrome trace a step, of the loop's phases and every traced process, for ui.perfetto.dev.

torch writes a trace for each process: times since a base that all processes of a host share, device numbers as process
ids of GPUs, flow ids that count from 0. In one file these ids are made distinct, and every process gets a name.
"""

import gzip
import json
import re
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
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_BASE = re.compile(r'"baseTimeNanoseconds"\s*:\s*(\d+)')
_ID = re.compile(r'"(pid|id)":\s*(\d+)')
_TIME = re.compile(r'"ts":\s*(-?\d+(?:\.\d+)?)')
_NAME = re.compile(r'("name":\s*"process_name".*?"args":\s*\{\s*"name":\s*")([^"]*)(")', re.DOTALL)


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
    base_ns = None
    with gzip.open(target, "wt", encoding="utf-8", compresslevel=4) as out:
        for number, (name, path) in enumerate(traces.items()):
            with gzip.open(path, "rt", encoding="utf-8") as file:
                text = file.read()
            base = _BASE.search(text)
            own_base_ns = int(base[1]) if base else 0
            if base_ns is None:
                base_ns = own_base_ns
                phases = phase_events(spans, offset_ns=epoch_ns - base_ns)
                out.write(f'{{"baseTimeNanoseconds": {base_ns}, "displayTimeUnit": "ms", "traceEvents": [\n')
                out.write(json.dumps(phases)[1:-1])
            events = _distinct(_events(text, path), name, number, shift_us=(own_base_ns - base_ns) / 1e3)
            out.write(f",\n{events}" if events.strip() else "")
        assert base_ns is not None, "no process was traced"
        out.write("\n]}\n")


def _events(text: str, path: Path) -> str:
    """The inside of the list of events."""
    start = _EVENTS.search(text)
    assert start is not None, f"{path} is no Chrome trace"
    end = text.rfind('"traceName"')
    return text[start.end() : text.rindex("]", start.end(), end if end > start.end() else len(text))]


def _distinct(events: str, name: str, number: int, *, shift_us: float) -> str:
    """Events whose ids no other trace has, at times of the common clock, of processes with a name."""
    events = _ID.sub(lambda match: f'"{match[1]}": {int(match[2]) + (number + 1) * _STRIDE}', events)
    label = json.dumps(name)[1:-1]
    events = _NAME.sub(lambda match: f"{match[1]}{label}{match[3]}", events)
    if shift_us:
        events = _TIME.sub(lambda match: f'"ts": {float(match[1]) + shift_us:.3f}', events)
    return events


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
