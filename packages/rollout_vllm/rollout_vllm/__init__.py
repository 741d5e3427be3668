"""Rollout over native vLLM HTTP servers: start and watch them, ask them for groups of samples."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import RolloutClient
    from .config import RolloutConfig, SamplingConfig
    from .errors import (
        ControlError,
        KVCacheTooSmallError,
        ModelFolderError,
        NoServerError,
        PortInUseError,
        RequestTooLongError,
        RolloutConfigError,
        RolloutError,
        ServerDiedError,
        ServerStartError,
    )
    from .samples import Endpoint, Failure, GroupResult, Request, Sample, request_seed
    from .server import ServerGroup, check_launch

__all__ = [
    "ControlError",
    "Endpoint",
    "Failure",
    "GroupResult",
    "KVCacheTooSmallError",
    "ModelFolderError",
    "NoServerError",
    "PortInUseError",
    "Request",
    "RequestTooLongError",
    "RolloutClient",
    "RolloutConfig",
    "RolloutConfigError",
    "RolloutError",
    "Sample",
    "SamplingConfig",
    "ServerDiedError",
    "ServerGroup",
    "ServerStartError",
    "check_launch",
    "request_seed",
]

_EXPORTS = {
    "ControlError": ".errors",
    "Endpoint": ".samples",
    "Failure": ".samples",
    "GroupResult": ".samples",
    "KVCacheTooSmallError": ".errors",
    "ModelFolderError": ".errors",
    "NoServerError": ".errors",
    "PortInUseError": ".errors",
    "Request": ".samples",
    "RequestTooLongError": ".errors",
    "RolloutClient": ".client",
    "RolloutConfig": ".config",
    "RolloutConfigError": ".errors",
    "RolloutError": ".errors",
    "Sample": ".samples",
    "SamplingConfig": ".config",
    "ServerDiedError": ".errors",
    "ServerGroup": ".server",
    "ServerStartError": ".errors",
    "check_launch": ".server",
    "request_seed": ".samples",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
