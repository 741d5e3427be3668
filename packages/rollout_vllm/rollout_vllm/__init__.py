"""Rollout with native vLLM HTTP servers: starts and monitors servers, generates groups of samples."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client.client import RolloutClient
    from .config import RolloutConfig, SamplingConfig
    from .episodes.episodes import Episode, EpisodeGroup, EpisodeResult, TurnFailedError, run_episodes
    from .episodes.remote_rewards import RemoteReward, classification_reward, http_reward, judge_reward, pooling_reward
    from .episodes.rewards import RewardOutcome, RewardPool
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
    from .samples import (
        Endpoint,
        Failure,
        FirstGroups,
        GroupResult,
        PartialGroup,
        Request,
        Sample,
        VersionSpan,
        request_seed,
        token_versions,
    )
    from .servers.control import LoraAdapters
    from .servers.group import ServerGroup, check_launch
    from .servers.ray_servers import launch_on_ray
    from .servers.running import check_running
    from .servers.watch import ServerWatch, WatchEvent

__all__ = [
    "ControlError",
    "Endpoint",
    "Episode",
    "EpisodeGroup",
    "EpisodeResult",
    "Failure",
    "FirstGroups",
    "GroupResult",
    "KVCacheTooSmallError",
    "LoraAdapters",
    "ModelFolderError",
    "NoServerError",
    "PartialGroup",
    "PortInUseError",
    "RemoteReward",
    "Request",
    "RequestTooLongError",
    "RewardOutcome",
    "RewardPool",
    "RolloutClient",
    "RolloutConfig",
    "RolloutConfigError",
    "RolloutError",
    "Sample",
    "SamplingConfig",
    "ServerDiedError",
    "ServerGroup",
    "ServerStartError",
    "ServerWatch",
    "TurnFailedError",
    "VersionSpan",
    "WatchEvent",
    "check_launch",
    "check_running",
    "classification_reward",
    "http_reward",
    "judge_reward",
    "launch_on_ray",
    "pooling_reward",
    "request_seed",
    "run_episodes",
    "token_versions",
]

_MODULES = {
    ".client.client": ("RolloutClient",),
    ".config": ("RolloutConfig", "SamplingConfig"),
    ".episodes.episodes": ("Episode", "EpisodeGroup", "EpisodeResult", "TurnFailedError", "run_episodes"),
    ".episodes.remote_rewards": (
        "RemoteReward",
        "classification_reward",
        "http_reward",
        "judge_reward",
        "pooling_reward",
    ),
    ".episodes.rewards": ("RewardOutcome", "RewardPool"),
    ".errors": (
        "ControlError",
        "KVCacheTooSmallError",
        "ModelFolderError",
        "NoServerError",
        "PortInUseError",
        "RequestTooLongError",
        "RolloutConfigError",
        "RolloutError",
        "ServerDiedError",
        "ServerStartError",
    ),
    ".samples": (
        "Endpoint",
        "Failure",
        "FirstGroups",
        "GroupResult",
        "PartialGroup",
        "Request",
        "Sample",
        "VersionSpan",
        "request_seed",
        "token_versions",
    ),
    ".servers.control": ("LoraAdapters",),
    ".servers.group": ("ServerGroup", "check_launch"),
    ".servers.ray_servers": ("launch_on_ray",),
    ".servers.running": ("check_running",),
    ".servers.watch": ("ServerWatch", "WatchEvent"),
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
