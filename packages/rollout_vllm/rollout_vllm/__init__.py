"""Rollout over native vLLM HTTP servers: start and watch them, ask them for groups of samples."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client.client import RolloutClient
    from .client.partial import token_versions
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
    )
    from .servers.control import LoraAdapters
    from .servers.ray_servers import launch_on_ray
    from .servers.running import check_running
    from .servers.server import ServerGroup, check_launch
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

_EXPORTS = {
    "ControlError": ".errors",
    "Endpoint": ".samples",
    "Episode": ".episodes.episodes",
    "EpisodeGroup": ".episodes.episodes",
    "EpisodeResult": ".episodes.episodes",
    "Failure": ".samples",
    "FirstGroups": ".samples",
    "GroupResult": ".samples",
    "KVCacheTooSmallError": ".errors",
    "LoraAdapters": ".servers.control",
    "ModelFolderError": ".errors",
    "NoServerError": ".errors",
    "PartialGroup": ".samples",
    "PortInUseError": ".errors",
    "RemoteReward": ".episodes.remote_rewards",
    "Request": ".samples",
    "RequestTooLongError": ".errors",
    "RewardOutcome": ".episodes.rewards",
    "RewardPool": ".episodes.rewards",
    "RolloutClient": ".client.client",
    "RolloutConfig": ".config",
    "RolloutConfigError": ".errors",
    "RolloutError": ".errors",
    "Sample": ".samples",
    "SamplingConfig": ".config",
    "ServerDiedError": ".errors",
    "ServerGroup": ".servers.server",
    "ServerStartError": ".errors",
    "ServerWatch": ".servers.watch",
    "TurnFailedError": ".episodes.episodes",
    "VersionSpan": ".samples",
    "WatchEvent": ".servers.watch",
    "check_launch": ".servers.server",
    "check_running": ".servers.running",
    "classification_reward": ".episodes.remote_rewards",
    "http_reward": ".episodes.remote_rewards",
    "judge_reward": ".episodes.remote_rewards",
    "launch_on_ray": ".servers.ray_servers",
    "pooling_reward": ".episodes.remote_rewards",
    "request_seed": ".samples",
    "run_episodes": ".episodes.episodes",
    "token_versions": ".client.partial",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
