"""Records which collectives of torch.distributed a piece of code calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter_tensor",
    "scatter",
)


@contextmanager
def record_calls() -> Iterator[list[str]]:
    """Names of the torch.distributed functions that this process calls inside the block, in order.

    Only calls through the module are seen (`dist.all_reduce(...)`), not what torch calls inside itself. For
    collectives of every kind, with sizes and call sites, see `ds_engine.record_collectives`.
    """
    import torch.distributed as dist

    calls: list[str] = []

    def recorded(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return original(*args, **options)

        return call

    with ExitStack() as stack:
        for name in _COLLECTIVES:
            stack.enter_context(patch.object(dist, name, recorded(name)))
        yield calls
