"""Rewards by name and by data source."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from ..config import RewardConfig
from ..errors import DataConfigError, UnknownDataSourceError
from .base import Reward
from .code import CodeReward
from .equivalence import MathReward
from .gsm8k import Gsm8kReward
from .multiple_choice import MultipleChoiceReward
from .reasoning_gym import ReasoningGymReward
from .text import FormatReward, LengthReward

REWARDS: Mapping[str, type[Reward]] = {
    "gsm8k": Gsm8kReward,
    "math": MathReward,
    "multiple_choice": MultipleChoiceReward,
    "format": FormatReward,
    "length": LengthReward,
    "code": CodeReward,
    "reasoning_gym": ReasoningGymReward,
}
"""The rewards that a configuration can name."""

_BY_DATA_SOURCE: dict[str, type[Reward]] = {
    "openai/gsm8k": Gsm8kReward,
    "gsm8k": Gsm8kReward,
    "lighteval/MATH": MathReward,
    "DigitalLearningGmbH/MATH-lighteval": MathReward,
    "HuggingFaceH4/MATH-500": MathReward,
    "reasoning_gym": ReasoningGymReward,
}


def make_reward(name: str, options: Mapping[str, Any] | None = None) -> Reward:
    """The reward `name` of the registry with these options.

    Raises:
        DataConfigError: no such reward or option, an option that is missing, or a value that is not allowed.
    """
    if name not in REWARDS:
        raise DataConfigError("no reward of the registry", value=name, allowed=", ".join(REWARDS))
    reward, options = REWARDS[name], dict(options or {})
    allowed = [field.name for field in fields(reward)]
    if unknown := [option for option in options if option not in allowed]:
        raise DataConfigError(f"unknown option of {name!r}", field=unknown[0], allowed=", ".join(allowed))
    required = [field.name for field in fields(reward) if field.default is MISSING]
    if missing := [option for option in required if option not in options]:
        raise DataConfigError(f"missing; {name!r} needs it", field=missing[0])
    return reward(**options)


def register_reward(data_source: str, reward: type[Reward]) -> None:
    """Use `reward` for prompts of `data_source` in this process. Raises DataConfigError if there is another one."""
    if _BY_DATA_SOURCE.get(data_source, reward) is not reward:
        problem = "the data source already has a reward"
        raise DataConfigError(problem, field="data_source", value=data_source, remedy="choose another name")
    _BY_DATA_SOURCE[data_source] = reward


def reward_for(data_source: str, config: RewardConfig | None = None) -> Reward:
    """The reward of `data_source`, with the options that `config` has for it.

    Raises:
        UnknownDataSourceError: no reward is registered for it; names the registered data sources.
    """
    if data_source not in _BY_DATA_SOURCE:
        raise UnknownDataSourceError(
            "no reward is registered for it",
            field="data_source",
            value=data_source,
            allowed=", ".join(sorted(_BY_DATA_SOURCE)),
            remedy="name a reward in the configuration, or call rl_data.register_reward before loading the data",
        )
    reward, config = _BY_DATA_SOURCE[data_source], config or RewardConfig()
    options = {field.name: getattr(config, field.name) for field in fields(reward) if hasattr(config, field.name)}
    return reward(**options)
