"""Rollout over native vLLM HTTP servers: start and watch them, ask them for groups of samples."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import RolloutClient
    from .config import RolloutConfig, SamplingConfig
    from .control import LoraAdapters
    from .episodes import Episode, EpisodeGroup, EpisodeResult, TurnFailedError, run_episodes
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
    from .partial import token_versions
    from .ray_servers import launch_on_ray
    from .remote_rewards import RemoteReward, classification_reward, http_reward, judge_reward, pooling_reward
    from .rewards import RewardOutcome, RewardPool
    from .running import check_running
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
    )
    from .server import ServerGroup, check_launch
    from .watch import ServerWatch, WatchEvent

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

_EXPORTS = {
    "ControlError": ".errors",
    "Endpoint": ".samples",
    "Episode": ".episodes",
    "EpisodeGroup": ".episodes",
    "EpisodeResult": ".episodes",
    "Failure": ".samples",
    "FirstGroups": ".samples",
    "GroupResult": ".samples",
    "KVCacheTooSmallError": ".errors",
    "LoraAdapters": ".control",
    "ModelFolderError": ".errors",
    "NoServerError": ".errors",
    "PartialGroup": ".samples",
    "PortInUseError": ".errors",
    "RemoteReward": ".remote_rewards",
    "Request": ".samples",
    "RequestTooLongError": ".errors",
    "RewardOutcome": ".rewards",
    "RewardPool": ".rewards",
    "RolloutClient": ".client",
    "RolloutConfig": ".config",
    "RolloutConfigError": ".errors",
    "RolloutError": ".errors",
    "Sample": ".samples",
    "SamplingConfig": ".config",
    "ServerDiedError": ".errors",
    "ServerGroup": ".server",
    "ServerStartError": ".errors",
    "ServerWatch": ".watch",
    "TurnFailedError": ".episodes",
    "VersionSpan": ".samples",
    "WatchEvent": ".watch",
    "check_launch": ".server",
    "check_running": ".running",
    "classification_reward": ".remote_rewards",
    "http_reward": ".remote_rewards",
    "judge_reward": ".remote_rewards",
    "launch_on_ray": ".ray_servers",
    "pooling_reward": ".remote_rewards",
    "request_seed": ".samples",
    "run_episodes": ".episodes",
    "token_versions": ".partial",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
