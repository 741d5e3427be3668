"""Exceptions of this package. They carry fields, of which the sentence that a user reads is made."""

from typing import Any


class RLCoreError(Exception):
    """Base class of this package's exceptions.

    Args:
        problem: what is wrong, if `allowed` does not say it.
        field: name of the argument.
        value: what was given; `...` for none.
        allowed: values that would be accepted.
        remedy: what the caller can do.
    """

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
        self.problem, self.field, self.value, self.allowed, self.remedy = problem, field, value, allowed, remedy

    def __str__(self) -> str:
        parts = [
            "" if self.value is ... else f"got {self.value!r}",
            self.problem,
            f"allowed: {self.allowed}" if self.allowed else "",
            self.remedy or "",
        ]
        return (f"{self.field}: " if self.field else "") + "; ".join(filter(None, parts))


class ArgumentError(RLCoreError, ValueError):
    """A number or an option out of its range."""


class BatchError(RLCoreError, ValueError):
    """A batch that cannot be divided into mini batches, ranks and micro batches; `allowed` names sizes that work."""


class ShapeError(RLCoreError, ValueError):
    """Shapes, lengths or columns of tensors or sequences do not match."""


def require(ok: bool, field: str, value: Any, allowed: str) -> None:
    """Raise `ArgumentError` for the argument `field` unless `ok`."""
    if not ok:
        raise ArgumentError(field=field, value=value, allowed=allowed)
