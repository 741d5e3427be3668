"""Replaces methods of vLLM. Every replacement of this package is made here and recorded."""

import functools
from collections.abc import Callable
from typing import Any

#: Replaced methods, as ``module.Class.method``.
REPLACED: list[str] = []

_MARK = "_plinth_weight_sync"


def replace_method(owner: type, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace ``owner.name`` by ``wrap(original)``. Has no effect when it is already replaced.

    Raises AttributeError when this vLLM has no such method: a patch without effect would go unnoticed.
    """
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return
    replacement = functools.wraps(original)(wrap(original))
    setattr(replacement, _MARK, True)
    setattr(owner, name, replacement)
    REPLACED.append(f"{owner.__module__}.{owner.__qualname__}.{name}")
