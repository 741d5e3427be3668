"""Peak resident memory of a piece of code, for tests and examples that say what an operation allocates."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def peak_memory(function: Callable[[], Result]) -> tuple[Result, int]:
    """(result of `function`, bytes by which the peak resident memory of this process exceeded its start).

    Linux only: it resets the kernel's high-water mark of the process (man 5 proc, clear_refs). It counts what is
    touched first inside `function`: memory that an earlier call freed without returning it to the system is not counted
    again. Raises OSError where /proc cannot be written.
    """
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_bytes("VmRSS")
    result = function()
    return result, max(0, _resident_bytes("VmHWM") - before)


def _resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024
