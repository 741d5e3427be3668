"""Tries the user's reward functions before anything starts: one call with the first prompt and a made-up response.

A function may fail on a response that it cannot parse, and training leaves such a sample out, so a failure is a
warning. A function that does not start, ends its process or has the parameters of another library is refused.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from rl_data import Prompt, Reward
from rollout_vllm import AsyncRewardPool, RewardOutcome, RewardPool, Sample

from ..errors import InputError
from .scoring import RewardFunction, call_function, foreign_hint, load_functions
from .scoring_config import ScoringConfig

_TIMEOUT_S = 5.0  # time limit of a call


def has_functions(config: ScoringConfig) -> bool:
    """True if there is a function to try: one of the user's."""
    return config.function is not None or any(not term.is_registered for term in config.terms.values())


def try_rewards(
    config: ScoringConfig, prompts: Mapping[str, Prompt], *, tokenizer: Any, refuses: bool = True
) -> list[str]:
    """Calls each function of the user, in a process of its own, on a made-up response to each of `prompts`.

    `prompts`: name of a dataset -> its first prompt. `refuses`: False: only warns, because an episode may score itself.

    Returns warnings. Raises InputError for a function that scores no response, whatever the response is.
    """
    lines: list[str] = []
    for function in load_functions(config).values():
        if isinstance(function.call, Reward):
            continue
        hint = foreign_hint(function.call, function.key)
        for dataset, prompt in prompts.items():
            outcome = asyncio.run(_call(function, prompt, config, tokenizer))
            if outcome.score is not None and not hint:
                continue
            place = f"the first prompt of {dataset} ({prompt.id}; columns in prompt.extra: {', '.join(prompt.extra)})"
            problem = f"it gives no score for {place}: {outcome.message}" if outcome.score is None else ""
            if refuses and problem and (hint or outcome.kind in ("start", "crash")):
                raise InputError(problem, field=function.key, value=function.name, remedy=hint or _signature(function))
            lines.append(f"warning: {function.key}={function.name}: {problem or _signature(function)}. {hint}".rstrip())
            break
    return lines


def sample_text(ground_truth: str) -> str:
    """A short response that gives the answer in the formats that rewards look for."""
    answer = ground_truth or "1"
    formats = f"<answer>{answer}</answer>\nThe answer is \\boxed{{{answer}}}.\n#### {answer}"
    return f"<think>\nI calculate.\n</think>\n{formats}"


async def _call(function: RewardFunction, prompt: Prompt, config: ScoringConfig, tokenizer: Any) -> RewardOutcome:
    """The outcome for a made-up response; a batched function gets the bare answer as a second one."""
    pool_type = AsyncRewardPool if function.is_coroutine else RewardPool
    texts = [sample_text(prompt.ground_truth), prompt.ground_truth or "1"][: 1 + function.batched]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    drafts = [
        Sample(
            sample_index=0,
            prompt=prompt,
            prompt_ids=np.asarray(prompt.token_ids, np.int32),
            response_ids=np.asarray(ids, np.int32),
            finish_reason="stop",
            text=text,
        )
        for text, ids in zip(texts, encoded, strict=True)
    ]
    with pool_type(timeout_s=min(_TIMEOUT_S, config.timeout_s), start_timeout_s=config.start_timeout_s) as pool:
        return (await call_function(pool, function, drafts))[0]


def _signature(function: RewardFunction) -> str:
    """Call and result of a function in words."""
    name = function.name.partition(":")[2]
    if function.batched:
        return f"{name}(response_texts, prompts) returns a list with a finite number for each response"
    return f"{name}(response_text, prompt) returns a finite number"
