"""Progress output: one line per step."""

import math
import time
from collections import deque
from collections.abc import Mapping
from statistics import median


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
        self._next_step = 1
        self._last = time.monotonic()
        self._durations: deque[float] = deque(maxlen=10)

    def step(
        self,
        step: int,
        *,
        score: float | None = None,
        throughput: float | None = None,
        step_s: float | None = None,
        extra: Mapping[str, float | str] | None = None,
    ) -> None:
        """Print the line of a finished step.

        Args:
            score: mean score of the step.
            throughput: tokens per second, in total or per device.
            step_s: seconds of the step; None takes the time since the last line.
            extra: further short values by name, at the end of the line.
        """
        now = time.monotonic()
        wall_s, self._last = now - self._last, now
        # The time before the first step is start-up; that between later steps (checkpoints, validation) comes again.
        self._durations.append(wall_s if self._durations or step_s is None else step_s)
        self._next_step = step + 1
        width = len(str(self.total_steps))
        parts = [f"step {step:>{width}}/{self.total_steps}"]
        if score is not None:
            parts.append(f"score {score:6.3f}")
        if throughput is not None:
            parts.append(f"{throughput:>7,.0f} tok/s")
        parts.append(f"{wall_s if step_s is None else step_s:5.1f} s/step")
        parts += [f"{k} {v if isinstance(v, str) else format(v, '.3g')}" for k, v in (extra or {}).items()]
        parts.append(f"{duration_text(self.time_left_s):>6} left" if step < self.total_steps else "  done")
        print("  ".join(parts), flush=True)

    @property
    def time_left_s(self) -> float:
        """Estimated seconds until the last step is done; nan before the first step."""
        left = max(0, self.total_steps - self._next_step + 1)
        return left * median(self._durations) if self._durations else math.nan

    def restart_clock(self) -> None:
        """Start the next step's time now (after validation or a recovery, which are not part of it)."""
        self._last = time.monotonic()
