"""Phase timer: nested wall-clock phases of a step, reported as `timing_s/*`.

`timing_s/step` is the wall time of the step without the phases marked `outside` (validation). This is the
usual definition: generation, reward, log-probs, updates, checkpoint and sync.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from .errors import TrackingError


@dataclass(kw_only=True)
class TimingNode:
    """One phase of a step: its own wall time and the phases inside it."""

    name: str
    seconds: float = 0.0
    outside: bool = False
    children: dict[str, "TimingNode"] = field(default_factory=dict)


class Laps:
    """Seconds between marks, for what happens once."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._laps: list[tuple[str, float]] = []

    def mark(self, name: str) -> None:
        """Ends a lap."""
        now = time.perf_counter()
        self._laps.append((name, now - self._last))
        self._last = now

    def __str__(self) -> str:
        laps = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._laps)
        return f"{self._last - self._start:.1f} s: {laps}"


class PhaseTimer:
    """Times the nested phases of one step after the other.

    ```
    timer = PhaseTimer()
    with timer.step():
        with timer.phase("rollout"):
            ...
        with timer.phase("update"):
            with timer.phase("backward"):
                ...
    timer.metrics()   # timing_s/step, timing_s/rollout, timing_s/update, timing_s/update/backward, timing_s/other
    ```

    Phases of other threads and asyncio tasks count too: a task started inside a phase belongs to that phase; a thread
    starts at the top level. The phases of a step can then sum to more than its wall time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._root = TimingNode(name="step")
        self._open: ContextVar[TimingNode | None] = ContextVar("open_phase", default=None)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one step; clears the phases of the previous step."""
        root = self._root = TimingNode(name="step")
        with self._timed(root, inner=None):
            yield

    @contextmanager
    def phase(self, name: str, *, outside: bool = False) -> Iterator[None]:
        """Time a phase inside the current phase.

        Args:
            name: one word.
            outside: excluded from the step's time (validation). Only for top-level phases of the step.

        Raises:
            ValueError: an `outside` phase inside another phase.
        """
        parent = self._open.get()
        if outside and parent is not None:
            raise TrackingError(f"it lies within phase {parent.name!r}", field="outside", value=outside)
        with self._lock:
            node = (parent or self._root).children.setdefault(name, TimingNode(name=name))
        node.outside = outside
        with self._timed(node, inner=node):
            yield

    @contextmanager
    def _timed(self, node: TimingNode, *, inner: TimingNode | None) -> Iterator[None]:
        """Add the time of the block to `node`; phases in it are those of `inner` (None: of the step)."""
        start = time.perf_counter()
        token = self._open.set(inner)
        try:
            yield
        finally:
            self._open.reset(token)
            with self._lock:
                node.seconds += time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """Seconds of the step, of every phase by its path, and of what no top-level phase covers (`other`)."""
        phases: dict[str, float] = {}

        def visit(nodes: Mapping[str, TimingNode], prefix: str) -> None:
            for name, node in nodes.items():  # parents before children
                phases[f"{prefix}{name}"] = node.seconds
                visit(node.children, f"{prefix}{name}/")

        visit(self._root.children, "timing_s/")
        tops = self._root.children.values()
        step_s = max(0.0, self._root.seconds - sum(node.seconds for node in tops if node.outside))
        other_s = max(0.0, step_s - sum(node.seconds for node in tops if not node.outside))
        return {"timing_s/step": step_s, **phases, "timing_s/other": other_s}
