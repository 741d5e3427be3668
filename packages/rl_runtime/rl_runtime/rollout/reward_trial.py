"""Tries the user's reward functions on a prompt before anything starts: a function that can score nothing is refused.

A function may fail on a response that it cannot parse: training leaves that sample out. So a function gets short
responses with the ground truth in the usual formats until one has a score. If none has, it is refused where that does
not depend on the response, and a warning says so where it may.
"""

import ast
import asyncio
import inspect
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from textwrap import dedent
from typing import Any, cast

import numpy as np

from rl_data import Prompt, Reward
from rollout_vllm import AsyncRewardPool, RewardOutcome, RewardPool, Sample

from ..errors import InputError
from .scoring import RewardFunction, call_function, foreign_hint, load_functions
from .scoring_config import ScoringConfig
from .unread import MayScoreError, NotText, unread, unread_async

_TIMEOUT_S = 5.0
"""Time limit of a call, and time after which no other response is tried."""
_NEVER_A_SCORE = re.compile(r"the (batched reward (is|has) |reward is (?!NoneType )\w+ .*not a number)")
"""A type that no response would change; None may stand for a response that has no score."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Why a function gave no score. is_certain: it gives none to any response."""

    function: RewardFunction
    outcome: RewardOutcome
    is_certain: bool


def has_functions(config: ScoringConfig) -> bool:
    """Whether there is a function to try: one of the user's."""
    return config.function is not None or any(not term.is_registered for term in config.terms.values())


def try_rewards(
    config: ScoringConfig, prompts: Mapping[str, Prompt], *, tokenizer: Any, refuses: bool = True
) -> list[str]:
    """Calls each function of the user, in a process of its own, on a short response to each of `prompts`.

    Services and rewards of the registry are not called.

    Args:
        prompts: what a prompt is -> the prompt, as in `{"training": …}`.
        tokenizer: counts the tokens of the responses.
        refuses: False: only warns, because an episode may score itself.

    Returns:
        Warnings.

    Raises:
        InputError: a function scores no response, whatever it says; names the key, the row and what to write.
    """
    lines: list[str] = []
    for function in load_functions(config).values():
        if isinstance(function.call, Reward):
            continue
        if hint := foreign_hint(function.call, function.key):
            lines.append(f"warning: {function.key} is {function.name}, which {_is_called(function)}. {hint}")
        for what, prompt in prompts.items():
            found = asyncio.run(_try(function, prompt, config, tokenizer))
            if found is None:
                continue
            where = f"the first prompt of {what} ({prompt.id})"
            if found.is_certain and refuses:
                raise InputError(_refusal(found, where, prompt))
            lines.append(_warning(found, where, config))
            break
    return lines


def sample_texts(ground_truth: str) -> tuple[str, ...]:
    """Short responses that give an answer, in the formats that rewards look for; the first has most of them."""
    answer = ground_truth or "1"
    thought = "<think>\nI calculate.\n</think>\n"
    return (
        f"{thought}<answer>{answer}</answer>\nThe answer is \\boxed{{{answer}}}.\n#### {answer}",
        answer,
        f"{thought}<answer>{answer}</answer>",
        json.dumps({"answer": answer}),
        "",
    )


async def _try(function: RewardFunction, prompt: Prompt, config: ScoringConfig, tokenizer: Any) -> Finding | None:
    """Why the function gives no score to short responses; None if it gives one."""
    pool_type = AsyncRewardPool if function.is_coroutine else RewardPool
    timeout_s = min(_TIMEOUT_S, config.timeout_s)
    failures: list[RewardOutcome] = []
    with pool_type(timeout_s=timeout_s, start_timeout_s=config.start_timeout_s) as pool:
        begin = time.monotonic()
        for texts in _calls(function, sample_texts(prompt.ground_truth)):
            outcomes = await call_function(pool, function, [_draft(prompt, text, tokenizer) for text in texts])
            if any(outcome.score is not None for outcome in outcomes):
                return None
            failures.append(outcomes[0])
            is_late = time.monotonic() - begin > _TIMEOUT_S
            if is_late or outcomes[0].kind != "exception" or _is_certain(function, outcomes[0]):
                break
        is_certain = _is_certain(function, failures[0]) or (
            failures[-1].kind == "exception" and await _fails_unread(pool, function, prompt)
        )
    return Finding(function=function, outcome=failures[0], is_certain=is_certain)


def _is_certain(function: RewardFunction, outcome: RewardOutcome) -> bool:
    """Whether the failure itself shows that no response can have a score."""
    if outcome.kind in ("start", "crash"):
        return True
    if outcome.kind != "exception":
        return False
    misuses_prompt = bool(re.match(r"(TypeError|AttributeError): .*\bPrompt\b", outcome.message))
    returned_none = outcome.message.startswith("the reward is NoneType ") and _returns_nothing(function.call)
    return misuses_prompt or returned_none or bool(_NEVER_A_SCORE.match(outcome.message))


async def _fails_unread(pool: RewardPool, function: RewardFunction, prompt: Prompt) -> bool:
    """Whether the function fails without using the response."""
    call = partial(unread_async if function.is_coroutine else unread, function.call)
    drafts = [_draft(prompt, cast(str, NotText()), None) for _ in range(2 if function.batched else 1)]
    outcome = (await call_function(pool, replace(function, call=call), drafts))[0]
    may_score = outcome.message.startswith(MayScoreError.__name__)
    return outcome.kind == "exception" and not may_score


def _calls(function: RewardFunction, texts: Sequence[str]) -> list[list[str]]:
    """The responses of each call: one, or for a batched function a group of all, and then groups of two equal ones."""
    return [[*texts], *([text] * 2 for text in texts)] if function.batched else [[text] for text in texts]


def _draft(prompt: Prompt, text: str, tokenizer: Any) -> Sample:
    """A sample with this response."""
    ids = () if tokenizer is None else tokenizer([text], add_special_tokens=False)["input_ids"][0]
    return Sample(
        sample_index=0,
        prompt=prompt,
        prompt_ids=np.asarray(prompt.token_ids, np.int32),
        response_ids=np.asarray(ids, np.int32),
        finish_reason="stop",
        text=text,
    )


def _returns_nothing(call: Callable[..., Any]) -> bool:
    """Whether no `return` in the source of a function has a value, as where it was forgotten."""
    while isinstance(call, partial):
        call = call.func
    try:
        function = ast.parse(dedent(inspect.getsource(call))).body[0]
    except (OSError, TypeError, SyntaxError):  # no source, or a part of a line, such as a lambda
        return False
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    nodes: list[ast.AST] = list(function.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
            return False
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            nodes += ast.iter_child_nodes(node)
    return True


def _is_called(function: RewardFunction) -> str:
    """How the function is called and what it returns."""
    name = function.name.partition(":")[2]
    if function.batched:
        return f"is called as {name}(response_texts, prompts) and returns a list with a finite number for each response"
    return f"is called as {name}(response_text, prompt) and returns a finite number"


def _refusal(found: Finding, where: str, prompt: Prompt) -> str:
    function, columns = found.function, ", ".join(prompt.extra) or "none"
    hint = foreign_hint(function.call, function.key)
    if not hint and re.match(r"the reward is (list|tuple|ndarray) ", found.outcome.message):
        hint = f"For lists of responses and prompts: {function.key.removesuffix('function')}batched=true."
    return (
        f"{function.key} is {function.name}, which gives no score for {where}: {found.outcome.message}. It "
        f"{_is_called(function)}; a prompt has text, ground_truth, data_source, messages and extra[column], with the "
        f"columns: {columns}. {hint}"
    ).rstrip()


def _warning(found: Finding, where: str, config: ScoringConfig) -> str:
    function = found.function
    if found.outcome.kind == "timeout":
        return (
            f"warning: {function.key} is {function.name}, which took longer than {min(_TIMEOUT_S, config.timeout_s):g} "
            f"s for {where} and was not tried to its end; reward.timeout_s is {config.timeout_s:g}"
        )
    return (
        f"warning: {function.key} is {function.name}, which gives no score to short responses with the ground truth of "
        f"{where}: {found.outcome.message}; samples without a score are left out, and a step without any ends the run"
    )
