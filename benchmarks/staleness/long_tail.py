"""Responses of log-normal lengths, as a rollout function: mean 512 tokens, at most 4,096."""

import math
import random
from typing import Any

MEAN_TOKENS, SIGMA, MOST_TOKENS = 512, 1.0, 4096


def num_tokens(name: str) -> int:
    """The length of a sample, the same in every run. exp(mu + sigma^2 / 2) is the mean of a log-normal number."""
    mu = math.log(MEAN_TOKENS) - SIGMA**2 / 2
    return max(1, min(MOST_TOKENS, round(random.Random(name).lognormvariate(mu, SIGMA))))


async def respond(episode: Any, prompt: Any, tokenizer: Any) -> float:
    """One turn of that many tokens; the score is 1 for an even number of them."""
    turn = await episode.generate(max_tokens=num_tokens(f"{episode.prompt_id} {episode.sample_index}"))
    return float(turn.response_ids.sum() % 2 == 0)
