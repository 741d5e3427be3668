"""Root of the packages' exceptions.

An error about a setting carries fields: `field` (dotted path), `value`, `allowed` and `remedy`. The sentence that a
user reads is made of them, so that no caller parses a message.
"""

import copy
import copyreg
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

_MAX_VALUE = 80


class PlinthError(Exception):
    """Base class of every package's exceptions. Pickles with all attributes, also those of subclasses.

    Args:
        problem: what is wrong, if `allowed` does not say it.
        field: dotted path of the setting or argument.
        value: what was given; `...` for none, as None is a value.
        allowed: values that would be accepted.
        remedy: what the user can do.
    """

    problem: str
    field: str | None
    value: Any
    allowed: str | None
    remedy: str | None
    # No defaults in the class: Ray raises an error of a remote task as a subclass that looks up missing attributes.

    def __init__(
        self,
        problem: str = "",
        *,
        field: str | None = None,
        value: Any = ...,
        allowed: str | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.field = field
        self.value = value
        self.allowed = allowed
        self.remedy = remedy

    @property
    def explanation(self) -> str:
        """The sentence without the field: value, problem, allowed values and remedy."""
        parts = [
            "" if self.value is ... else f"got {shown(self.value)}",
            self.problem,
            f"allowed: {self.allowed}" if self.allowed else "",
            self.remedy or "",
        ]
        return "; ".join(filter(None, parts))

    def __str__(self) -> str:
        return f"{self.field}: {self.explanation}" if self.field else self.explanation

    def under(self, section: str) -> Self:
        """A copy whose field is below `section`: `rollout.port` for `port`, `rollout` for an error without a field."""
        error = copy.copy(self)
        error.field = ".".join(filter(None, (section, self.field)))
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        # Without a call of __init__, whose parameters differ between subclasses.
        return (copyreg.__newobj__, (type(self), *self.args), self.__dict__)  # type: ignore[attr-defined]


@contextmanager
def prefix_fields(section: str) -> Iterator[None]:
    """Context that places errors about a field below `section`: `port` becomes `rollout.port`.

    Errors without a field pass unchanged.
    """
    try:
        yield
    except PlinthError as error:
        if not error.field:
            raise
        raise error.under(section) from error


def listed(items: Iterable[object], *, most: int = 3, separator: str = ", ") -> str:
    """The first items for a message, and the number of the others."""
    texts = [str(item) for item in items]
    more = f"{separator.rstrip(', ')} and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


def shown(value: Any) -> str:
    """The value for a message, as in YAML or Python, in at most 80 characters: of a path, the end tells most."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE // 2 - 3]}...{text[-_MAX_VALUE // 2 :]}"
