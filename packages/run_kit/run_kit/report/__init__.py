"""HTML reports: one self-contained page about a run, or comparing several, made from run folders."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .comparison import write_comparison
    from .page import write_report

_EXPORTS = {"write_comparison": ".comparison", "write_report": ".page"}

__all__ = ["write_comparison", "write_report"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
