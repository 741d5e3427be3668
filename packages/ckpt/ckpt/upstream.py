"""Fence around private parts of DeepSpeed.

DeepSpeed's own path saves in the foreground and unpickles, so a feature is refused where its parts are not as tested.
`plinth doctor` lists all of them.
"""

import logging

from plinth_base.fence import Fence

from .errors import CheckpointUsageError

FENCE = Fence(
    {"deepspeed": ">=0.19.8,<0.20"}, refusal=CheckpointUsageError, warn=logging.getLogger(__package__).warning
)
"""pyproject.toml states the same versions."""


def records() -> list[dict[str, str]]:
    """One row for each patch of the package, with its state here: active, refused or not installed."""
    return FENCE.records(f"{__package__}.{module}" for module in ("savers.deepspeed_async", "zero.deepspeed_load"))
