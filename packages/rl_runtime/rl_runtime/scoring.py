"""Scores beside the rollout: the user's function or the data source's rule, in processes of their own."""

from collections.abc import Callable

from rl_data import reward_for
from rollout_vllm import RewardOutcome, RewardPool

from .config import ScoringConfig
from .experience import PromptLike
from .functions import load_function


class Scorer:
    """Scores responses while others are still generated. Close it, or use it as a context.

    A function that raises, takes too long or ends its process costs that sample its score and nothing else.

    Raises:
        InputError: `config.function` is no such function.
    """

    def __init__(self, config: ScoringConfig) -> None:
        self._config = config
        self._function = load_reward(config.function) if config.function is not None else None
        self._pool = RewardPool(num_workers=config.num_workers, timeout_s=config.timeout_s)

    @property
    def full_score(self) -> float:
        """What a right answer gets."""
        return self._config.score

    async def score(self, text: str, prompt: PromptLike) -> RewardOutcome:
        """The score of a response, or why there is none."""
        if self._function is not None:
            return await self._pool.score(self._function, text, prompt)
        rule = reward_for(prompt.data_source)
        return await self._pool.score(rule, text, prompt.ground_truth, self._config)

    def close(self) -> None:
        """Ends the processes."""
        self._pool.close()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_reward(name: str) -> Callable[..., float]:
    """The function that `reward.function` names.

    Raises:
        InputError: there is none that can be called so.
    """
    return load_function(name, key="reward.function", arguments=("response_text", "prompt"))
