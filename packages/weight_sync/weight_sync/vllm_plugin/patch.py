"""Fence around private parts of vLLM that this plugin replaces or reads. `records` lists all of them."""

import logging

from plinth_base.fence import Fence, installed_version

from ..errors import SyncConfigError

FENCE = Fence({"vllm": ">=0.26,<0.33"}, refusal=SyncConfigError, warn=logging.getLogger("vllm.weight_sync").warning)
"""pyproject.toml states the same versions."""

_MODULES = ("__init__", "adapters", "apply", "engine", "held_requests", "layout", "processing", "stale_replies")


def records() -> list[dict[str, str]]:
    """One row for each patch of the plugin, with its state here: active, stock path, refused or not installed."""
    modules = _MODULES if installed_version("vllm") else ()  # they import vLLM
    return FENCE.records(f"{__package__}.{module}" for module in modules)
