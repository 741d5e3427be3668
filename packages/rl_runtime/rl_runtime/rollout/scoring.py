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

from ..config import JUDGE_FIELDS_OF_DATA, ScoringConfig
from ..experience import PromptLike
from .user_functions import load_function

_SERVICE_CALLS = 64
"""Calls that a service gets at the same time."""
_ROUNDS_WITHOUT_ANSWER, _ROUNDS_AFTER_AN_ANSWER = 4, 16
"""Timeouts in a row, as a multiple of the calls at the same time, after which scoring is given up."""


class Scorer:
    """Scores responses while others are generated: functions in processes of their own, services over HTTP.

    A call that raises, times out, ends its process or gets no answer affects only its own sample. Timeouts in a row are
    reported, and after several rounds of them every call fails at once (`gave_up`), so that a function that always
    hangs cannot stall the run for hours. Close the scorer, or use it as a context manager.

    Raises:
        InputError: `config.function` cannot be imported or called.
    """

    def __init__(self, config: ScoringConfig, *, report: Callable[[str], None] = print) -> None:
        """`report` gets a line when as many calls in a row as run at the same time have timed out."""
        self._config, self._report = config, report
        self._num_timeouts, self._has_answered = 0, False
        self._calls: set[asyncio.Future[RewardOutcome]] = set()
        self.gave_up = ""
        """Why no call is made any more; empty while calls are made."""
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
        if self.gave_up:
            return self._refusal()
        call = asyncio.ensure_future(self._score(text, prompt))
        self._calls.add(call)
        try:
            outcome = await call
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return self._refusal()
        finally:
            self._calls.discard(call)
        self._count(outcome)
        return outcome

    def _refusal(self) -> RewardOutcome:
        return RewardOutcome(None, "timeout", self.gave_up)

    def _count(self, outcome: RewardOutcome) -> None:
        """Reports timeouts in a row, and gives up where they do not end."""
        if outcome.kind != "timeout":
            self._num_timeouts, self._has_answered = 0, self._has_answered or outcome.kind == "ok"
            return
        self._num_timeouts += 1
        config = self._config
        at_once = config.num_workers if self._pool is not None else _SERVICE_CALLS
        limit = at_once * (_ROUNDS_AFTER_AN_ANSWER if self._has_answered else _ROUNDS_WITHOUT_ANSWER)
        what = f"reward.url={config.url}" if config.url else f"reward.function={config.function or 'built in'}"
        hangs = (
            f"{what} hangs: its last {self._num_timeouts} calls took longer than reward.timeout_s={config.timeout_s:g}"
        )
        if self._num_timeouts == at_once:
            self._report(f"warning: {hangs}; the run ends after {limit} such calls in a row")
        elif self._num_timeouts == limit:
            self.gave_up = f"{hangs}; mend it, raise reward.timeout_s, or score more at a time (reward.num_workers)"
            for call in self._calls:
                call.cancel()

    async def _score(self, text: str, prompt: PromptLike) -> RewardOutcome:
        if self._pool is None:
            return await self._ask_service(text, prompt)
        if self._function is not None:
            return await self._pool.score(self._function, text, prompt)
        return await self._pool.score(reward_for(prompt.data_source, self._config), text, prompt)

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
    api_key = config.read_api_key()
    if config.service == "http":
        return http_reward(url, api_key=api_key, timeout_s=config.timeout_s)
    endpoint = Endpoint(url.rstrip("/"), api_key)
    if config.service == "classification":
        return classification_reward(endpoint, label=config.label, timeout_s=config.timeout_s)
    if config.service == "pooling":
        return pooling_reward(endpoint, timeout_s=config.timeout_s)
    assert config.judge_prompt is not None
    return judge_reward(endpoint, prompt=config.judge_prompt, trusted=JUDGE_FIELDS_OF_DATA, timeout_s=config.timeout_s)


def load_reward(name: str) -> Callable[..., float]:
    """Imports the function `reward.function`.

    Raises:
        InputError: it cannot be imported or called.
    """
    return load_function(name, key="reward.function", arguments=("response_text", "prompt"))
