"""Signals that end a program: as exceptions that run its cleanup code, or as a request to stop at a safe point."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], None]
_GRACEFUL = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_raised: signal.Signals | None = None
"""The signal whose SystemExit ends the program: `ray.get` and `ray.wait` replace that exception with SystemExit(1)."""


class RunStopped(SystemExit):
    """Ends a run that a signal stopped at a safe point; the exit code is 128 + the signal's number."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(128 + number)
        self.signal = number


class StopRequest:
    """A request to stop at the run's next safe point, made by SIGINT (Ctrl-C), SIGTERM or SIGUSR1.

    ```
    stop = StopRequest()
    with stop.listen("stopping after this step; again: stop now"):
        while work and not stop.signal:
            work.pop()()
    ```
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The signal that asked for the stop; None if there was none."""

    @contextmanager
    def listen(self, notice: str) -> Iterator[None]:
        """Context in which the first signal sets `signal` and prints `notice`; the next one acts as it did before.

        Only the main thread receives signals: in another one this does nothing.
        """
        previous: dict[signal.Signals, Any] = {}

        def note(signum: int, _frame: FrameType | None) -> None:
            self.signal = signal.Signals(signum)
            _restore(previous)
            _notify(f"{self.signal.name}: {notice}")

        with _handled(_GRACEFUL if self.signal is None else (), note, previous):
            yield


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Run cleanup code on SIGINT, SIGTERM, SIGHUP and SIGUSR1, and do not let a second signal cut it short.

    The first signal raises (KeyboardInterrupt, SystemExit); the second only prints a notice; the third interrupts.
    A SystemExit leaves with the code 128 + the signal's number, whatever became of it on its way.
    """
    global _raised
    count = 0

    def handle(signum: int, _frame: FrameType | None) -> None:
        global _raised
        nonlocal count
        count += 1
        if count == 2:
            _notify("still cleaning up; one more signal stops at once and may leave processes behind")
        elif signum == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            _raised = signal.Signals(signum)
            raise SystemExit(128 + signum)

    with _handled((*_GRACEFUL, signal.SIGHUP), handle, {}):
        try:
            yield
        except SystemExit as error:
            number = stopping_signal(error)
            if number is None or error.code == 128 + number:
                raise
            raise SystemExit(128 + number) from error
        finally:
            _raised = None


@contextmanager
def _handled(
    numbers: Sequence[signal.Signals], handler: Handler, previous: dict[signal.Signals, Any]
) -> Iterator[None]:
    """Installs `handler` and puts what it replaces into `previous`, which is restored at the end."""
    with suppress(ValueError):  # not the main thread
        for number in numbers:
            # A signal that was ignored at the start (nohup, a shell's background job) stays ignored.
            if signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        _restore(previous)


def _notify(text: str) -> None:
    """Writes to stderr from a signal handler, where `print` may be interrupted in itself."""
    with suppress(OSError):  # a terminal that is gone
        os.write(2, f"\n{text}\n".encode(errors="backslashreplace"))


def _restore(previous: dict[signal.Signals, Any]) -> None:
    while previous:
        number, handler = previous.popitem()
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def stopping_signal(error: BaseException | None) -> signal.Signals | None:
    """The signal that `error` reports, as `StopRequest` and `signals_as_exceptions` raise it; None for other errors."""
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    if isinstance(error, SystemExit) and error.code == 1 and _raised:
        return _raised
    number = error.code - 128 if isinstance(error, SystemExit) and isinstance(error.code, int) else 0
    return signal.Signals(number) if number in _GRACEFUL or number == signal.SIGHUP else None
