"""Configuration of the rollout: episodes, over-sampling, dynamic sampling."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import check_at_least, check_value


@dataclass(frozen=True, kw_only=True)
class EpisodeConfig:
    """Multi-turn responses, driven by an environment or a function of yours (tools, games)."""

    function: str | None = None
    """`package.module:function`, a coroutine function that is called as `function(episode, prompt, tokenizer)` for each
    sample; null: single-turn responses. `sampling.max_tokens` limits the whole response including context. A number
    that it returns, or passes to `episode.reward(number)` after a turn, is the score; else `reward` scores."""
    environment: str | None = None
    """`package.module:Class` with `reset(prompt)` and `step(action_text) -> (observation, reward, done, info)`, instead
    of `function`. Each episode has an object of it in a process of its own. Its rewards are the score; an environment
    that gives none (None) leaves scoring to `reward`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment class."""
    max_turns: int = 8
    """Turns after which an episode in an environment ends as it is."""
    step_timeout_s: float = 30.0
    """Seconds of `reset` and of each `step` of the environment; a slower one fails its own sample."""
    start_timeout_s: float = 60.0
    """Seconds to start the environment's process, import its module and make its object."""
    max_environments: int = 256
    """Environments that run at the same time; further episodes wait."""
    timeout_s: float | None = None
    """Seconds after which an episode fails and is left out of the batch; null: no limit."""

    def __post_init__(self) -> None:
        if self.function is not None and self.environment is not None:
            raise ValueError(f"environment is {self.environment!r}; allowed: null with a function ({self.function!r})")
        if self.options and self.environment is None:
            raise ValueError(f"options is {dict(self.options)}; allowed: {{}} without an environment")
        check_at_least(1, self, "max_turns", "max_environments")
        for name in ("step_timeout_s", "start_timeout_s"):
            check_value(self, name, getattr(self, name) > 0, "above 0 seconds")
        check_value(self, "timeout_s", self.timeout_s is None or self.timeout_s > 0, "above 0 seconds, or null")


@dataclass(frozen=True, kw_only=True)
class OversamplingConfig:
    """Steps that do not wait for the longest responses. Such a run is not reproducible bit for bit."""

    extra_prompts: int = 0
    """Prompts requested in addition to `batch.train_batch_size`; a step proceeds once `train_batch_size` groups are
    complete. 0: it waits for all. Short responses finish first, so dropping the others biases the batch."""
    partial_rollouts: bool = True
    """Unfinished groups are resumed by the next step; their tokens keep the policy version that sampled them. False
    drops them."""

    def __post_init__(self) -> None:
        check_at_least(0, self, "extra_prompts")


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """Groups whose scores do not differ are replaced by groups of fresh prompts (DAPO, arXiv:2503.14476)."""

    max_rounds: int = 0
    """Further rounds of generation in a step, each for the groups that are missing to `batch.train_batch_size`. After
    them, the step trains on the groups it has. 0: off, a step trains on all groups."""
    min_spread: float = 0.0
    """A group is kept if its maximum score exceeds its minimum by more than this."""

    def __post_init__(self) -> None:
        check_at_least(0, self, "max_rounds")
        check_value(self, "min_spread", 0 <= self.min_spread < math.inf, "0 or more")
        if self.min_spread and not self.max_rounds:
            raise ValueError(f"min_spread is {self.min_spread}; allowed: 0 with max_rounds=0, which keeps every group")
