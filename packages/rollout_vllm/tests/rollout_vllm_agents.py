"""Agents, as a user writes them, and a policy in memory whose sampled tokens are all told apart by their log-probs."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import AsyncOpenAI, OpenAI

from rollout_vllm import Failure, Group, Request, Sample, SamplingConfig

EOS = 256


class ChatTokenizer:
    """Token i is byte i; 256 ends a turn, written ¶; 257 is another token for "a", which no text is encoded to. With a
    chat template."""

    chat_template = "its own"
    all_special_ids = (EOS,)
    name_or_path = "bytes"

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        pieces = [list(piece.encode()) for piece in text.split("¶")]
        return {"input_ids": [*pieces[0], *(token for piece in pieces[1:] for token in (EOS, *piece))]}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text = "".join({EOS: "¶", 257: "a"}.get(token) or chr(token) for token in ids)
        return text.replace("¶", "") if skip_special_tokens else text

    def apply_chat_template(
        self, messages: Sequence[Any], *, tools: Any, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        head = f"[tools {len(tools)}]" if tools else ""
        calls = [json.dumps([call["function"] for call in message.get("tool_calls", ())]) for message in messages]
        texts = [
            f"[{message['role']}]{message['content']}{made if made != '[]' else ''}¶"
            for message, made in zip(messages, calls, strict=True)
        ]
        return head + "".join(texts) + ("[assistant]" if add_generation_prompt else "")


class Policy:
    """A client whose turns are random letters, or `answers` in their order. The log-prob of a token is its number.

    turns: (prompt, sampled tokens, log-probs) of every turn that it has returned. failing: share of requests that fail.
    """

    def __init__(self, answers: Sequence[str] = (), *, failing: float = 0.0, delay_s: float = 0.0) -> None:
        self.turns: list[tuple[list[int], list[int], list[float]]] = []
        self._answers, self._failing, self._delay_s = list(answers), failing, delay_s
        self._random, self._num_tokens = random.Random(0), 0

    async def sample(self, request: Request, sampling: SamplingConfig) -> Group:
        await asyncio.sleep(self._delay_s * self._random.random())
        if self._random.random() < self._failing:
            place = {"prompt_id": request.prompt_id, "sample_index": 0, "num_attempts": 1}
            return Group(request=request, failures=(Failure(kind="server", message="it died", **place),))
        letters = self._random.choices([97, 98, 32, 257], k=self._random.randint(0, 6))
        thoughts = b"<think>b</think>" if self._random.random() < 0.3 else b""
        text = self._answers.pop(0).encode() if self._answers else [*thoughts, *letters]
        ids = [*text, EOS][: sampling.response_tokens]
        log_probs = [-float(self._num_tokens + index) for index in range(len(ids))]
        self._num_tokens += len(ids)
        self.turns.append((list(request.prompt_ids), ids, log_probs))
        sample = Sample(
            sample_index=0,
            response_ids=ids,
            log_probs=log_probs,
            finish_reason="stop" if ids[-1] == EOS else "length",
            last_policy_version=len(self.turns) // 3,
        )
        return Group(request=request, samples=(sample,))


def ask(client: OpenAI, messages: list[Any], **settings: Any) -> Any:
    """The first message that the policy answers with."""
    return client.chat.completions.create(model="policy", messages=messages, **settings).choices[0].message


def two_turns(base_url: str, api_key: str, prompt: Any, *, score: float = 1.0) -> float:
    """Plain: it keeps the conversation."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": prompt}]
    messages += [ask(client, messages), {"role": "user", "content": "go on"}]
    ask(client, messages)
    return score


async def in_parallel(base_url: str, api_key: str, prompt: Any) -> float:
    """Three requests at once, after one that they continue, and n=2."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        first = [{"role": "user", "content": prompt}]
        answer = await client.chat.completions.create(model="policy", messages=first, n=2)  # type: ignore[arg-type]
        first.append({"role": "assistant", "content": answer.choices[1].message.content or ""})
        branches = [[*first, {"role": "user", "content": f"part {index}"}] for index in range(3)]
        asked = [client.chat.completions.create(model="policy", messages=branch) for branch in branches]  # type: ignore
        await asyncio.gather(*asked)
    return 0.5


def by_turn(base_url: str, api_key: str, prompt: Any) -> dict[str, float]:
    """It rewards its two turns on their own."""
    client = OpenAI()  # from the environment
    messages = [{"role": "user", "content": prompt}]
    replies = [client.chat.completions.create(model="policy", messages=messages) for _ in range(2)]  # type: ignore
    return {replies[0].id: 0.25, replies[1].id: 0.5}


def crashing(base_url: str, api_key: str, prompt: Any) -> None:
    """It raises after a turn."""
    ask(OpenAI(base_url=base_url, api_key=api_key), [{"role": "user", "content": prompt}])
    raise ValueError("no idea")


def endless(base_url: str, api_key: str, prompt: Any) -> float:
    """It asks until its context is full."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    for count in range(100):
        try:
            ask(client, [{"role": "user", "content": prompt}])
        except Exception as error:
            return count if "context" in str(error) else -1.0
    return -2.0


def silent(base_url: str, api_key: str, prompt: Any) -> float:
    """It asks nothing."""
    return 1.0


def sleeping(base_url: str, api_key: str, prompt: Any) -> float:
    """It starts a process, and takes too long."""
    subprocess.Popen(["sleep", "977"])
    time.sleep(60)
    return 1.0


def seen(base_url: str, api_key: str, prompt: Any) -> float:
    """It writes down what it can reach."""
    ask(OpenAI(), [{"role": "user", "content": "hello"}])
    with open(prompt, "w") as file:
        json.dump({"pid": os.getpid(), "url": base_url, "key": api_key}, file)
    return 1.0


def curious(base_url: str, api_key: str, prompt: dict[str, Any]) -> None:
    """It raises with what it reaches: {name: shell command} of the row, each run by a shell as a model's would be."""
    ask(OpenAI(base_url=base_url, api_key=api_key), [{"role": "user", "content": "hello"}])
    done = {name: subprocess.run(["sh", "-c", command], capture_output=True) for name, command in prompt.items()}
    raise ValueError(f"reached: {[name for name, result in done.items() if result.returncode == 0]}")


def greedy(base_url: str, api_key: str, prompt: Any) -> float:
    """It takes a GiB of memory."""
    return float(len(bytearray(1 << 30)))


def compacting(base_url: str, api_key: str, prompt: Any) -> float:
    """It asks the question of a row, goes on twice in parallel, and then goes on from the end of the conversation."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": prompt.text}]
    first = ask(client, messages, max_tokens=12)
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": prompt.text}]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: ask(client, messages, max_tokens=12).content, range(2)))
    ask(client, [messages[-1], {"role": "assistant", "content": answers[0]}, messages[0]], max_tokens=12)
    return float(sum(str(prompt.ground_truth) in answer for answer in (first.content, *answers)))
