"""Rewards by name and by data source."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from ..config import RewardConfig
from ..errors import UnknownDataSourceError
from .base import Reward
from .code import CodeReward
from .equivalence import MathReward
from .gsm8k import Gsm8kReward
from .multiple_choice import MultipleChoiceReward
from .text import FormatReward, LengthReward

REWARDS: Mapping[str, type[Reward]] = {
    "gsm8k": Gsm8kReward,
    "math": MathReward,
    "multiple_choice": MultipleChoiceReward,
    "format": FormatReward,
    "length": LengthReward,
    "code": CodeReward,
}
"""The rewards that a configuration can name."""

_BY_DATA_SOURCE: dict[str, type[Reward]] = {
    "openai/gsm8k": Gsm8kReward,
    "gsm8k": Gsm8kReward,
    "lighteval/MATH": MathReward,
    "DigitalLearningGmbH/MATH-lighteval": MathReward,
    "HuggingFaceH4/MATH-500": MathReward,
}


def make_reward(name: str, options: Mapping[str, Any] | None = None) -> Reward:
    """The reward `name` of the registry with these options.

    Raises:
        ValueError: no such reward or option, an option that is missing, or a value that is not allowed.
    """
    if name not in REWARDS:
        raise ValueError(f"{name!r} is no reward of the registry; allowed: {', '.join(REWARDS)}")
    reward, options = REWARDS[name], dict(options or {})
    allowed = [field.name for field in fields(reward)]
    if unknown := [option for option in options if option not in allowed]:
        raise ValueError(f"{unknown[0]}: unknown option of {name!r}; allowed: {', '.join(allowed)}")
    required = [field.name for field in fields(reward) if field.default is MISSING]
    if missing := [option for option in required if option not in options]:
        raise ValueError(f"{missing[0]}: missing; {name!r} needs it")
    return reward(**options)


def register_reward(data_source: str, reward: type[Reward]) -> None:
    """Use `reward` for prompts of `data_source` in this process. Raises ValueError if another one is registered."""
    if _BY_DATA_SOURCE.get(data_source, reward) is not reward:
        raise ValueError(f"data_source={data_source!r}: already has a reward; choose another name")
    _BY_DATA_SOURCE[data_source] = reward


def reward_for(data_source: str, config: RewardConfig | None = None) -> Reward:
    """The reward of `data_source`, with the options that `config` has for it.

    Raises:
        UnknownDataSourceError: no reward is registered for it; names the registered data sources.
    """
    if data_source not in _BY_DATA_SOURCE:
        raise UnknownDataSourceError(
            f"data_source={data_source!r}: no reward is registered for it, only for "
            f"{', '.join(sorted(_BY_DATA_SOURCE))}. Change the data, name a reward in the configuration, or call "
            "rl_data.register_reward before loading it."
        )
    reward, config = _BY_DATA_SOURCE[data_source], config or RewardConfig()
    options = {field.name: getattr(config, field.name) for field in fields(reward) if hasattr(config, field.name)}
    return reward(**options)
