"""Reward functions that score nothing, or not every response, named as `rl_runtime_reward_functions:…`."""

import asyncio
import json
import os
import re
import time
import urllib.request
from collections.abc import Sequence
from typing import Any


def trl(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(one)) for one in completions]


def trl_constant(prompts: Any, completions: Any) -> list[float]:
    return [1.0 for _ in completions]


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return 1.0


def verl_with_defaults(data_source: str, solution_str: str, ground_truth: str = "", extra_info: Any = None) -> float:
    return float(solution_str.strip() == ground_truth)


def forgets_return(response_text: str, prompt: Any) -> None:
    float(prompt.ground_truth in response_text)


def text(response_text: str, prompt: Any) -> str:
    return f"{len(response_text)}"


def raises(response_text: str, prompt: Any) -> float:
    raise ValueError("not written yet")


async def raises_async(response_text: str, prompt: Any) -> float:
    await asyncio.sleep(0)
    raise ValueError("not written yet")


def lacks_a_column(response_text: str, prompt: Any) -> float:
    return float(prompt.extra["difficulty"]) * len(response_text)


def ends_its_process(response_text: str, prompt: Any) -> float:
    os._exit(3)


def not_a_number(response_text: str, prompt: Any) -> float:
    return float("nan")


def strict(response_text: str, prompt: Any) -> float:
    match = re.search(r"#### (-?\d+)", response_text)
    if match is None:
        raise ValueError("no ####")
    return float(match[1] == prompt.ground_truth)


def only_json(response_text: str, prompt: Any) -> float:
    return float(json.loads(response_text)["answer"] == prompt.ground_truth)


async def later(response_text: str, prompt: Any) -> float:
    await asyncio.sleep(0)
    return float(len(response_text))


def ranks(response_texts: Sequence[str], prompts: Sequence[Any]) -> list[float]:
    mean = sum(map(len, response_texts)) / len(response_texts)
    spread = max(abs(len(one) - mean) for one in response_texts)
    return [(len(one) - mean) / spread for one in response_texts]


# ---- formats that nobody else uses ---------------------------------------------------------------------------------


def no_service_yet(response_text: str, prompt: Any) -> float:
    with urllib.request.urlopen("http://127.0.0.1:9", timeout=1) as answer:
        return float(answer.read())


def knows_training_only(response_text: str, prompt: Any) -> float:
    return {"train": 1.0}[prompt.extra["part"]]


def slow(response_text: str, prompt: Any) -> float:
    time.sleep(60)
    return 1.0
