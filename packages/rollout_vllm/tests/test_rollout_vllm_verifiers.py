"""verifiers environments, with the real library; skipped without the extra `verifiers`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verifiers.v1", reason="needs verifiers 0.4")
from test_rollout_vllm_tools import CHATML, FakeClient, ids_of, tokenizer_of

from rollout_vllm import (
    AgentRollout,
    ChatFormat,
    Episode,
    Group,
    Request,
    SamplingConfig,
    agent_spec,
    run_episodes,
)
from rollout_vllm.episodes.verifiers import write_tasks

PATH = "rollout_vllm.episodes.verifiers:VerifiersAgent"
PATIENT = 600.0  # the first process imports the library
HARNESS = {"id": "rollout_vllm_verifiers_game"}
TASKSET = {"taskset": HARNESS}


def play(turns: Sequence[str], number: int = 7, *, max_tokens: int = 4096, **env: Any) -> tuple[Group, FakeClient]:
    tokenizer = tokenizer_of(CHATML)
    client: Any = FakeClient([ids_of(tokenizer, turn + "<|im_end|>") for turn in turns])
    spec = agent_spec(PATH, {"env": TASKSET | env}, start_timeout_s=PATIENT)
    rollout = AgentRollout(spec=spec, chat=ChatFormat(tokenizer), max_turns=8, max_prompt_tokens=60)
    task = {"prompt": "Find a number.", "system_prompt": "Be quick.", "number": number}

    async def function(episode: Episode) -> float | None:
        return await rollout(episode, SimpleNamespace(extra={"task": json.dumps(task)}))

    requests = [Request(prompt_id="p", prompt_ids=[0])]
    (group,) = asyncio.run(run_episodes(client, requests, function, SamplingConfig(n=1, max_tokens=max_tokens)))
    return group, client


def why(group: Group) -> str:
    return group.failures[0].message


def conversation(*messages: tuple[str, str], **options: Any) -> list[int]:
    tokenizer = tokenizer_of(CHATML)
    chat = [{"role": role, "content": content} for role, content in (("system", "Be quick."), *messages)]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **options)
    return ids_of(tokenizer, text)


def test_a_task_of_one_turn_is_scored_by_its_rewards() -> None:
    for answer, score in (("7", 2.0), ("8", 0.0)):
        group, client = play([answer])
        (result,) = group.samples
        assert client.prompts == [result.prompt_ids.tolist()] == [conversation(("user", "Find a number."))]
        assert result.response_ids.tolist() == ids_of(tokenizer_of(CHATML), f"{answer}<|im_end|>")
        assert result.score == score


def test_the_turns_of_an_environment_are_the_conversation_of_the_template() -> None:
    group, client = play(["5", " 9\n", "<think>\nIt is 7.\n</think>\n\n7"], hint="Wrong.")
    assert group.samples, group.failures
    (result,) = group.samples
    asked, hint = ("user", "Find a number."), ("user", "Wrong.")
    assert client.prompts[1] == conversation(asked, ("assistant", "5"), hint)
    assert client.prompts[2] == conversation(asked, ("assistant", "5"), hint, ("assistant", " 9\n"), hint)
    sampled = [
        token for token, own in zip(result.response_ids.tolist(), result.response_mask.tolist(), strict=True) if own
    ]
    tokenizer = tokenizer_of(CHATML)
    assert tokenizer.decode(sampled) == "5<|im_end|> 9\n<|im_end|><think>\nIt is 7.\n</think>\n\n7<|im_end|>"
    assert result.score == 1.5, "found, after two tries"


def test_calls_of_the_tools_of_the_agent_are_read_and_answered() -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"digit": %d}}\n</tool_call>'
    group, client = play(
        [call % 0, call % 1, "42"], 42, player={"harness": HARNESS | {"tool": True}, "runtime": {"type": "subprocess"}}
    )
    assert group.samples, group.failures
    from rollout_vllm_verifiers_game import LOOK

    messages = [
        ("user", "Find a number."),
        ("assistant", call % 0),
        ("tool", "4"),
        ("assistant", call % 1),
        ("tool", "2"),
    ]
    assert client.prompts[0] == conversation(*messages[:1], tools=[LOOK])
    assert client.prompts[2] == conversation(*messages, tools=[LOOK])
    assert group.samples[0].score == 2.0


def test_an_episode_without_tokens_left_is_scored_as_far_as_it_came() -> None:
    group, client = play(["5", "6", "8"], hint="Wrong. " * 20, max_tokens=200)
    (result,) = group.samples
    assert (result.finish_reason, len(client.prompts)) == ("length", 2)
    assert result.score == -0.5


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"raises": True}, "the board is broken"),
        ({"num_players": 2}, "2 agents of the episode are trainable"),
        ({"plyer": {}}, "plyer"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_reason(env: dict[str, Any], reason: str) -> None:
    group, _ = play(["5"] * 4, **env)
    assert reason in why(group)


def test_an_agent_that_forgets_and_sets_its_own_temperature_branches() -> None:
    harness = HARNESS | {"forgets": True, "temperature": 0.5}
    player = {"harness": harness, "runtime": {"type": "subprocess"}}
    group, _ = play(["5", "6", "7"], hint="Wrong.", player=player)
    assert group.samples, group.failures
    (result,) = group.samples
    assert (len(result.paths), result.num_turns, result.num_generated, result.score) == (3, 3, 6, 1.5)
    assert result.data == {"ignored_settings": ["temperature"]}


def test_a_task_that_lacks_a_field_is_named() -> None:
    spec = agent_spec(PATH, {"env": TASKSET}, start_timeout_s=PATIENT)
    rollout = AgentRollout(spec=spec, chat=ChatFormat(tokenizer_of(CHATML)), max_turns=8)

    async def function(episode: Episode) -> None:
        await rollout(episode, SimpleNamespace(extra={"task": {"prompt": "?"}}))

    requests = [Request(prompt_id="p", prompt_ids=[0])]
    client: Any = FakeClient([])
    (group,) = asyncio.run(run_episodes(client, requests, function, SamplingConfig(n=1, max_tokens=9)))
    assert "NumberData number Field required" in why(group)


def test_tasks_are_written_as_rows(tmp_path: Path) -> None:
    assert write_tasks(TASKSET, tmp_path / "rows.jsonl") == 2
    assert write_tasks(TASKSET, tmp_path / "row.jsonl", num_tasks=1) == 1
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["Find a number of 1 digits.", "Find a number of 2 digits."]
    assert [json.loads(row["task"])["number"] for row in rows] == [7, 42]
