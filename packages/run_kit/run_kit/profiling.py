"""Step profiler: Chrome traces of every traced process of a step, for ui.perfetto.dev."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol


class TraceRecorder(Protocol):
    """Records one trace of each of its processes at a time, such as torch's profiler."""

    def start(self) -> None: ...

    def stop(self, folder: Path) -> None:
        """Writes a trace of each process, named after it, into `folder`."""


class StepProfiler:
    """Traces the given steps into `<folder>/step_000003/`; other steps have no overhead."""

    def __init__(self, recorder: TraceRecorder, folder: Path, steps: Sequence[int]) -> None:
        self._recorder, self._folder, self._steps = recorder, folder, frozenset(steps)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Wraps one step and its timer; starting and stopping the profilers is outside the step's time."""
        if step not in self._steps:
            yield
            return
        traces = self._folder / f"step_{step:06d}"
        traces.mkdir(parents=True, exist_ok=True)
        self._recorder.start()
        yield
        self._recorder.stop(traces)
