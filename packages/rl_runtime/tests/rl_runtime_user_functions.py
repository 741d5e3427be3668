"""User functions for tests, named as `rl_runtime_user_functions:…`."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Prompt:
    id: str
    text: str = "1 + 1 ="
    token_ids: tuple[int, ...] = (1, 2)
    ground_truth: str = "2"
    data_source: str = "openai/gsm8k"
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()


def length_reward(response_text: str, prompt: Any) -> float:
    """The number of words."""
    return float(len(response_text.split()))


def moody_reward(response_text: str, prompt: Any) -> float:
    """Everything that can go wrong, by the prompt."""
    if prompt.id == "raises":
        raise RuntimeError("no idea")
    if prompt.id == "hangs":
        time.sleep(60)
    if prompt.id == "dies":
        os._exit(3)
    return float("nan") if prompt.id == "nan" else 1.0


def takes_too_many(response_text: str, prompt: Any, config: Any) -> float:
    return 0.0


async def two_turns(episode: Any, prompt: Any, tokenizer: Any) -> None:
    """Asks, answers with the prompt's own tokens, asks again."""
    await episode.generate(max_tokens=1)
    episode.add_context(prompt.token_ids)
    await episode.generate(max_tokens=1)


not_callable = 3
