"""The report of a run: one self-contained HTML page made from the run folder alone."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .page import write_report

_EXPORTS = {"write_report": ".page"}

__all__ = ["write_report"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
