"""Finds out whether a reward function fails before it uses the response: no response at all could then get a score.

`unread` runs in a scoring process, which imports nothing heavy for it.
"""

import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

_uses: list[str] = []
"""How the objects of this process were used."""


class MayScoreError(Exception):
    """The function used the response, or failed for a reason that may pass."""


class NotText:
    """Stands for a response. It has nothing of a text, and every use raises or is noted."""

    def _use(self, *_: object) -> NoReturn:
        _uses.append("used")
        raise TypeError("NotText was used")

    __getattr__ = __str__ = __repr__ = __format__ = __bool__ = __hash__ = __eq__ = __ne__ = _use
    __class__ = property(_use)

    def __reduce_ex__(self, protocol: object) -> tuple[type, tuple[()]]:
        return NotText, ()


def unread(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """What the function returns or raises; MayScoreError instead if it used a `NotText` or reached no service."""
    with _watched():
        return function(*args, **keywords)


async def unread_async(function: Callable[..., Awaitable[Any]], *args: Any, **keywords: Any) -> Any:
    """`unread` of a coroutine function."""
    with _watched():
        return await function(*args, **keywords)


@contextmanager
def _watched() -> Iterator[None]:
    """Notes uses by exceptions, too: those of C code (`re`, `json`) name the type, and the function may catch them."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "exception" and NotText.__name__ in f"{argument[1]}":
            _uses.append("raised")
        return trace

    _uses.clear()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    except BaseException as error:
        if _uses or _may_pass(error):
            raise MayScoreError from error
        raise
    finally:
        sys.settrace(before)
    if _uses:
        raise MayScoreError


def _may_pass(error: BaseException) -> bool:
    """Whether a service may be there later; HTTP clients have classes of their own for that."""
    name = type(error).__name__.lower()
    is_missing = isinstance(error, FileNotFoundError)
    return (isinstance(error, OSError) and not is_missing) or "connect" in name or "timeout" in name
