"""A file system of fsspec whose process dies between two requests, for tests of uploads and downloads."""

import itertools
import threading
from typing import Any

REQUESTS = ("put_file", "pipe_file", "mv", "rm", "rm_file", "makedirs", "get_file", "cat_file", "ls", "info", "exists")


class Died(BaseException):
    """The death of a process, which nothing catches."""


class Fate:
    """Counts the requests of all processes; from request `instant` on, the processes in `victims` are dead."""

    def __init__(self, instant: int, victims: frozenset[str], *, after: bool) -> None:
        self._instant, self._victims, self._after = instant, victims, after
        self._counter, self.happened = itertools.count(1), threading.Event()

    def meets(self, process: str) -> tuple[bool, bool]:
        """Two flags: the process is dead before its next request, or dies after it."""
        if next(self._counter) < self._instant or process not in self._victims:
            return False, False
        first = not self.happened.is_set()
        self.happened.set()
        return (False, True) if first and self._after else (True, True)


class MortalStorage:
    """The file system as one process sees it; after its death each request raises."""

    def __init__(self, fs: Any, process: str, fate: Fate) -> None:
        self._fs, self._process, self._fate = fs, process, fate

    def __getattr__(self, name: str) -> Any:
        original = getattr(self._fs, name)
        if name not in REQUESTS:
            return original

        def request(*arguments: Any, **options: Any) -> Any:
            dead, dies = self._fate.meets(self._process)
            if dead:
                raise Died
            result = original(*arguments, **options)
            if dies:
                raise Died
            return result

        return request
