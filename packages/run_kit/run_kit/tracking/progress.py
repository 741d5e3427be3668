"""Progress output: one line per step, and a live status line on terminals."""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import TextIO


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

    The time left is the median of the last ten steps times the steps to go. On a terminal `status` also shows the
    current phase on a line that is overwritten; a file or a pipe gets the step lines only.

    Args:
        total_steps: last step number.
        first_step: number of the first step of this process (a resumed run starts later).
        stream: output stream; None takes the current sys.stdout at each print.
        clock: monotonic seconds; for tests.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 1,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self._next_step = first_step
        self._stream = stream
        self._clock = clock
        self._last = clock()
        self._durations: deque[float] = deque(maxlen=10)
        self._status_shown = False
        self._status_time = -math.inf

    def step(
        self,
        step: int,
        *,
        score: float | None = None,
        throughput: float | None = None,
        step_s: float | None = None,
        extra: Mapping[str, float | str] | None = None,
    ) -> str:
        """Print the line of a finished step and return it.

        Args:
            score: mean score of the step.
            throughput: tokens per second, in total or per device.
            step_s: seconds of the step; None takes the time since the last line.
            extra: further short values by name, at the end of the line.
        """
        now = self._clock()
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
        line = "  ".join(parts)
        self.message(line)
        return line

    @property
    def time_left_s(self) -> float:
        """Estimated seconds until the last step is done; nan before the first step."""
        left = max(0, self.total_steps - self._next_step + 1)
        return left * median(self._durations) if self._durations else math.nan

    def message(self, text: str) -> None:
        """Print a line of text between the step lines."""
        self.close()
        stream = self._out()
        stream.write(f"{text}\n")
        stream.flush()

    def status(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Show the current phase, on terminals only and at most ten times a second: `step 4/30  rollout  128/256`."""
        stream = self._out()
        now = self._clock()
        if not _is_terminal(stream) or (now - self._status_time < 0.1 and done != total):
            return
        self._status_time = now
        line = f"step {self._next_step}/{self.total_steps}  {text}"
        if done is not None and total:
            filled = round(20 * min(1.0, done / total))
            line += f"  [{'#' * filled}{'-' * (20 - filled)}] {done}/{total}"
        stream.write(f"\r\x1b[2K{line[:150]}")
        stream.flush()
        self._status_shown = True

    def close(self) -> None:
        """Clear the status line."""
        if self._status_shown:
            stream = self._out()
            stream.write("\r\x1b[2K")
            stream.flush()
            self._status_shown = False

    def restart_clock(self) -> None:
        """Start the next step's time now (after validation or a recovery, which are not part of it)."""
        self._last = self._clock()

    def _out(self) -> TextIO:
        return self._stream if self._stream is not None else sys.stdout


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:
        return False  # closed
