"""Thread pools that still work while the interpreter shuts down."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, Self, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def num_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Pool:
    """A thread pool whose `submit` runs the work itself when no thread can be started.

    A background save can outlive the main thread, and Python starts no threads during interpreter shutdown.
    """

    def __init__(self, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="ckpt")

    def submit(
        self, work: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        """The future of `work(*args, **kwargs)`."""
        try:
            return self._executor.submit(work, *args, **kwargs)
        except RuntimeError:
            done: Future[_Result] = Future()
            try:
                done.set_result(work(*args, **kwargs))
            except BaseException as error:
                done.set_exception(error)
            return done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._executor.shutdown(cancel_futures=error is not None)
