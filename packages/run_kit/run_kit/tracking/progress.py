"""Progress output: one line per step."""

import math
import time
from collections import deque
from collections.abc import Mapping
from statistics import median

SCORE = "critic/score/mean"
"""The metric that the line of a step begins with."""


def duration_text(seconds: float) -> str:
    """A duration in two units at most: `7s`, `2m05s`, `3h20m`, `2d04h`; `?` if it is not finite."""
    if not math.isfinite(seconds):
        return "?"
    total = max(0, round(seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"


class Progress:
    """Prints `step  3/30  score 0.412  1,034 tok/s  4.2 s/step  1m53s left`.

    The time left is the median of the last ten steps times the steps to go.

    Args:
        total_steps: last step number.
    """

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self._last = time.monotonic()
        self._durations: deque[float] = deque(maxlen=10)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a finished step: its score, or its losses by name, and its speed if `metrics` have it."""
        now = time.monotonic()
        wall_s, self._last = now - self._last, now
        step_s = metrics.get("timing_s/step")
        # The time before the first step is start-up; that between later steps (checkpoints, validation) comes again.
        self._durations.append(wall_s if self._durations or step_s is None else step_s)
        parts = [f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}"]
        if SCORE in metrics:
            parts.append(f"score {metrics[SCORE]:6.3f}")
        if "perf/throughput" in metrics:
            parts.append(f"{metrics['perf/throughput']:>7,.0f} tok/s")
        parts.append(f"{wall_s if step_s is None else step_s:5.1f} s/step")
        losses = {} if SCORE in metrics else {k: v for k, v in metrics.items() if k.endswith("/loss")}
        parts += [f"{name.rpartition('/')[2]} {value:.3g}" for name, value in losses.items()]
        left_s = (self.total_steps - step) * median(self._durations)
        parts.append(f"{duration_text(left_s):>6} left" if step < self.total_steps else "  done")
        print("  ".join(parts), flush=True)

    def restart_clock(self) -> None:
        """Start the next step's time now (after validation or a recovery, which are not part of it)."""
        self._last = time.monotonic()
