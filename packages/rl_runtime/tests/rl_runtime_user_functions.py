"""User functions for tests, named as `rl_runtime_user_functions:…`."""

import asyncio
import json
import os
import time
import urllib.request
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
    images: tuple[str, ...] = ()


def last_word(response_text: str) -> str | None:
    """An answer to vote on."""
    return response_text.split()[-1] if response_text != "#### 4" else None


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


async def slow_reward(response_text: str, prompt: Any, *, seconds: float = 0.3, scale: float = 1.0) -> float:
    """Many at a time: it waits, as a request would."""
    await asyncio.sleep(60 if prompt.id == "hangs" else seconds)
    if prompt.id == "raises":
        raise RuntimeError("no idea")
    return scale


def rank_reward(response_texts: list[str], prompts: list[Any], num_tokens: list[int]) -> list[float]:
    """The rank of each response in its group."""
    if prompts[0].id == "short":
        return [1.0]
    print("ranking " * 1000)
    order = sorted(response_texts)
    return [float(order.index(text)) + num_tokens[0] * 100 for text in response_texts]


def level_reward(response_text: str, prompt: Any) -> float:
    """A column of the data."""
    return float(prompt.extra["level"])


def takes_too_many(response_text: str, prompt: Any, config: Any) -> float:
    return 0.0


async def two_turns(episode: Any, prompt: Any, tokenizer: Any) -> None:
    """Asks, answers with the prompt's own tokens, asks again."""
    await episode.generate(max_tokens=1)
    episode.add_context(prompt.token_ids)
    await episode.generate(max_tokens=1)


def asks(base_url: str, api_key: str, prompt: Any, *, times: int = 1) -> float | None:
    """An agent: it begins `times` conversations with the text of the row. A row named `silent` has no score."""
    for _ in range(times):
        body = json.dumps({"messages": [{"role": "user", "content": prompt.text}]}).encode()
        url, headers = f"{base_url}/chat/completions", {"Authorization": f"Bearer {api_key}"}
        urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
    return None if prompt.id == "silent" else {"fine": 2.0}[prompt.id]


not_callable = 3


class Echo:
    """An environment of two turns; the reward of a turn is its number, a prompt named `silent` has none."""

    def reset(self, prompt: Any) -> str | None:
        self.turns, self.prompt = 0, prompt
        return "ask" if prompt.id == "other prompt" else None

    def step(self, action: str) -> tuple[str, float | None, bool, dict[str, Any]]:
        if self.prompt.id == "raises":
            raise RuntimeError("no board")
        self.turns += 1
        return "more", None if self.prompt.id == "silent" else float(self.turns), self.turns == 2, {}


async def rewards_itself(episode: Any, prompt: Any, tokenizer: Any) -> float:
    """A turn, and a reward that it returns."""
    await episode.generate(max_tokens=1)
    return 0.25
