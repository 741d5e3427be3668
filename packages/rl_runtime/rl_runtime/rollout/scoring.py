"""Scores responses during the rollout: by the rule of the data source, a function of the user, or a service."""

import asyncio
from collections.abc import Callable

from rl_data import reward_for
from rollout_vllm import (
    Endpoint,
    RemoteReward,
    RewardOutcome,
    RewardPool,
    classification_reward,
    http_reward,
    judge_reward,
    pooling_reward,
)

from ..config import ScoringConfig
from ..experience import PromptLike
from .user_functions import load_function


class Scorer:
    """Scores responses while others are generated: functions in processes of their own, services over HTTP.

    A call that raises, times out, ends its process or gets no answer affects only its own sample. Close the scorer, or
    use it as a context manager.

    Raises:
        InputError: `config.function` cannot be imported or called.
    """

    def __init__(self, config: ScoringConfig) -> None:
        self._config = config
        self._function = load_reward(config.function) if config.function is not None else None
        self._pool: RewardPool | None = None
        self._service: RemoteReward | None = None
        if config.url is None:
            self._pool = RewardPool(
                num_workers=config.num_workers, timeout_s=config.timeout_s, start_timeout_s=config.start_timeout_s
            )
        else:
            self._service = connect_service(config, config.url)

    @property
    def full_score(self) -> float:
        """The score of a correct answer."""
        return self._config.score

    async def score(self, text: str, prompt: PromptLike) -> RewardOutcome:
        """The score of a response, or the reason why it has none."""
        if self._pool is None:
            return await self._ask_service(text, prompt)
        if self._function is not None:
            return await self._pool.score(self._function, text, prompt)
        rule = reward_for(prompt.data_source)
        return await self._pool.score(rule, text, prompt.ground_truth, self._config)

    def close(self) -> None:
        """Ends the processes and connections."""
        if self._pool is not None:
            self._pool.close()
        if self._service is not None:
            self._service.close()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _ask_service(self, text: str, prompt: PromptLike) -> RewardOutcome:
        assert self._service is not None
        if self._config.service in ("classification", "pooling"):
            return await asyncio.wrap_future(self._service.submit(prompt.text + text))
        fields = {
            "prompt": prompt.text,
            "response": text,
            "ground_truth": prompt.ground_truth,
            "data_source": prompt.data_source,
        }
        return await asyncio.wrap_future(self._service.submit(fields))


def connect_service(config: ScoringConfig, url: str) -> RemoteReward:
    """The client of the configured service."""
    if config.service == "http":
        return http_reward(url, api_key=config.api_key, timeout_s=config.timeout_s)
    endpoint = Endpoint(url.rstrip("/"), config.api_key)
    if config.service == "classification":
        return classification_reward(endpoint, label=config.label, timeout_s=config.timeout_s)
    if config.service == "pooling":
        return pooling_reward(endpoint, timeout_s=config.timeout_s)
    assert config.judge_prompt is not None
    return judge_reward(endpoint, prompt=config.judge_prompt, timeout_s=config.timeout_s)


def load_reward(name: str) -> Callable[..., float]:
    """Imports the function `reward.function`.

    Raises:
        InputError: it cannot be imported or called.
    """
    return load_function(name, key="reward.function", arguments=("response_text", "prompt"))
