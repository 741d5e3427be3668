"""Agents that ask the policy themselves: in a process of their own, over HTTP, in whatever order they like."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from rollout_vllm_agents import ChatTokenizer, Policy

from plinth_testing import wait_until
from rollout_vllm import (
    AgentRollout,
    ChatFormat,
    Episode,
    Group,
    Request,
    Sample,
    SamplingConfig,
    agent_spec,
    run_episodes,
)
from rollout_vllm.episodes.agent_endpoint import AgentEndpoint
from rollout_vllm.episodes.tools import hermes_calls
from rollout_vllm.episodes.tree import EpisodeTree, Turn


def play(name: str, policy: Policy | None = None, *, prompt: Any = "hello", n: int = 1, **options: Any) -> Group:
    run_keys = {key: options.pop(key) for key in ("episode_timeout_s",) if key in options}
    max_tokens = options.pop("max_tokens", 200)
    spec_keys = options.keys() & {"options", "isolated", "memory_bytes"}
    spec = agent_spec(f"rollout_vllm_agents:{name}", **{key: options.pop(key) for key in spec_keys})
    rollout = AgentRollout(spec=spec, chat=ChatFormat(ChatTokenizer()), **({"max_turns": 8} | options))
    client: Any = policy or Policy()
    request = Request(prompt_id="p", prompt_ids=[1, 2, 3], prompt=prompt, seed=7)
    sampling = SamplingConfig(n=n, max_tokens=max_tokens)
    (group,) = asyncio.run(
        run_episodes(client, [request], lambda episode: rollout(episode, episode.prompt), sampling, **run_keys)
    )
    return group


def sample_of(group: Group) -> Sample:
    assert not group.failures, group.failures[0].message
    return group.samples[0]


def text(ids: Any) -> str:
    return ChatTokenizer().decode(np.asarray(ids).tolist())


def assert_faithful(samples: Sequence[Sample], policy: Policy) -> None:
    """Every token that the policy sampled is trained once, behind the tokens that the policy saw."""
    trained = {}
    for path in (path for sample in samples for path in sample.paths):
        assert path.response_mask is not None
        assert path.log_probs is not None
        assert path.response_ids.size == path.versions.size
        for place in np.flatnonzero(path.response_mask).tolist():
            number = -int(path.log_probs[place])
            assert number not in trained, "a token is trained twice"
            trained[number] = (path, place)
    assert sorted(trained) == list(range(sum(len(ids) for _, ids, _ in policy.turns)))
    for prompt, ids, log_probs in policy.turns:
        paths = {id(trained[-int(log_prob)][0]): trained[-int(log_prob)] for log_prob in log_probs}
        ((path, end),) = paths.values()
        end += path.prompt_ids.size + 1
        assert path.token_ids[:end].tolist() == [*prompt, *ids]


def test_a_conversation_that_goes_on_is_one_sequence() -> None:
    policy = Policy(["one", "two"])
    sample = sample_of(play("two_turns", policy, options={"score": 0.75}))
    assert text(sample.token_ids) == "[user]hello¶[assistant]one¶[user]go on¶[assistant]two¶"
    assert (sample.score, sample.num_turns, len(sample.paths)) == (0.75, 2, 1)
    assert text(sample.response_ids[sample.response_mask]) == "one¶two¶"
    assert_faithful([sample], policy)


def test_parallel_requests_and_several_answers_are_branches() -> None:
    policy = Policy(["one", "two", "a", "b", "c"])
    sample = sample_of(play("in_parallel", policy))
    assert [len(sample.paths), sample.num_turns, sample.score] == [4, 5, 0.5]
    assert_faithful([sample], policy)
    assert len(sample.tree) == 5
    assert sample.tree[0] == "turn 0: 23 context '[user]hello¶[assistant]', 4 sampled (version 0) 'one'"
    assert sample.num_generated == len("onetwoabc") + 5


def test_rewards_of_turns_stand_at_their_last_tokens() -> None:
    sample = sample_of(play("by_turn", Policy(["one", "two"])))
    assert sample.score == 0.75
    assert [path.turn_rewards.tolist() for path in sample.paths if path.turn_rewards is not None] == [
        [0, 0, 0, 0.5],
        [0, 0, 0, 0.25],
    ]


def test_an_episode_that_fails_says_why() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("crashing", {}, "agent rollout_vllm_agents:crashing: ValueError: no idea"),
        ("silent", {}, "agent rollout_vllm_agents:silent: it ended without an answer of the policy"),
        ("two_turns", {"policy": Policy(failing=1.0)}, "it died"),
    ]
    for name, options, message in cases:
        (failure,) = play(name, **options).failures
        assert message in failure.message
        assert failure.kind == ("server" if "policy" in options else "rollout")


def test_a_full_context_and_the_last_turn_are_refusals_that_agents_know() -> None:
    for options, score in (({"max_turns": 3}, 3.0), ({"max_prompt_tokens": 5, "max_tokens": 5}, 0.0)):
        group = play("endless", Policy(), **options)
        if not score:
            assert "without an answer" in group.failures[0].message
            continue
        sample = sample_of(group)
        assert (sample.score, sample.finish_reason, sample.num_turns) == (score, "length", 3)


def commands() -> list[bytes]:
    """Command lines of all processes of this machine."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            lines.append(path.read_bytes())
    return lines


def test_an_agent_that_takes_too_long_ends_with_its_processes() -> None:
    (failure,) = play("sleeping", episode_timeout_s=3.0).failures
    assert failure.kind == "deadline"
    wait_until(lambda: b"sleep\x00977\x00" not in commands(), 30)  # also that of the other test with such an agent


def test_a_request_that_is_sent_again_gets_the_turn_that_nobody_has_read() -> None:
    policy: Any = Policy(["one", "two"], delay_s=0.2)
    episode = Episode(policy, Request(prompt_id="p", prompt_ids=[1]), 0, SamplingConfig(n=1, max_tokens=50))

    async def act() -> list[str]:
        chat, read = ChatFormat(ChatTokenizer()), []
        endpoint = AgentEndpoint(episode, chat, hermes_calls, max_turns=9, max_context=100)
        async with endpoint, aiohttp.ClientSession(headers={"x-api-key": endpoint.key}) as session:
            body = {"messages": [{"role": "user", "content": "hello"}]}
            with suppress(TimeoutError):
                await asyncio.wait_for(session.post(f"{endpoint.url}/chat/completions", json=body), timeout=0.05)
            for _ in range(2):  # the second one is new, since the first one was read
                answer = await session.post(f"{endpoint.url}/chat/completions", json=body)
                read.append((await answer.json())["choices"][0]["message"]["content"])
        return read

    assert asyncio.run(act()) == ["one", "two"]
    assert_faithful([episode.result(1.0)], policy)


# ---- the tree --------------------------------------------------------------------------------------------------------
@st.composite
def trees(draw: st.DrawFn) -> tuple[EpisodeTree, list[tuple[list[int], list[int], list[float]]]]:
    """A tree whose prompts continue, cut or ignore earlier turns, and its turns as a `Policy` has them."""
    tree, turns, number = EpisodeTree(), list[tuple[list[int], list[int], list[float]]](), 0
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=3)
    for version in range(draw(st.integers(1, 7))):
        before = draw(st.sampled_from([[]] + [[*prompt, *ids] for prompt, ids, _ in turns]))
        before = before[: draw(st.sampled_from([len(before), len(before), len(before) // 2]))]
        prompt, ids = [*before, *draw(tokens)], draw(tokens)
        log_probs = [-float(number + place) for place in range(len(ids))]
        number += len(ids)
        turns.append((prompt, ids, log_probs))
        sample = Sample(sample_index=0, response_ids=ids, log_probs=log_probs, last_policy_version=version)
        tree.add(prompt, sample)
    return tree, turns


@settings(deadline=None, derandomize=True, max_examples=300)
@given(trees())
def test_every_span_is_trained_once_behind_its_own_tokens(drawn: tuple[EpisodeTree, Any]) -> None:
    tree, turns = drawn
    policy: Any = SimpleNamespace(turns=turns)
    main, *branches = tree.samples(Sample(sample_index=0), {})
    sample = dataclasses.replace(main, branches=tuple(branches))
    assert_faithful([sample], policy)
    assert main.token_ids.tolist() == [*turns[-1][0], *turns[-1][1]], "the first path is that of the last turn"
    assert len(tree.lines()) == len(turns)
    version_of = {-log_prob: version for version, (_, _, log_probs) in enumerate(turns) for log_prob in log_probs}
    for path in sample.paths:
        assert path.generated_log_probs is not None
        assert path.generated_versions.tolist() == [version_of[-number] for number in path.generated_log_probs.tolist()]
    for index, turn in enumerate(tree.turns):  # it continues the longest turn that it can
        sizes = [len(p) + len(ids) for p, ids, _ in turns[:index] if turns[index][0][: len(p) + len(ids)] == [*p, *ids]]
        assert max(sizes, default=None) == (None if turn.parent is None else tree.turns[turn.parent].token_ids.size)


def test_a_reader_sees_who_continues_whom_and_what_was_said() -> None:
    tree = EpisodeTree()
    tree.decode = lambda ids: bytes(ids.tolist()).decode()
    for version, (prompt, said) in enumerate([(b"ab", b"c"), (b"abcd", b"e"), (b"abcf", b"g"), (b"axy", b"z")]):
        tree.add([*prompt], Sample(sample_index=0, response_ids=[*said], last_policy_version=version))
    assert tree.lines() == [
        "turn 0: 2 context 'ab', 1 sampled (version 0) 'c'",
        "  turn 1: 1 context 'd', 1 sampled (version 1) 'e'",
        "  turn 2: 1 context 'f', 1 sampled (version 2) 'g'",
        "turn 3, branches after 1 common tokens: 3 context 'xy', 1 sampled (version 3) 'z'",
    ]


# ---- what an agent's process reaches ------------------------------------------------------------------------------
def test_an_isolated_agent_reaches_the_policy_and_its_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "PYTEST_VERSION" in os.environ, "it stands for a secret"
    local = str(tmp_path / "unix")
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(local, family=socket.AF_UNIX):
        connect = f"import socket; socket.create_connection(('127.0.0.1', {listener.getsockname()[1]}))"
        closed = {
            "network": f'{sys.executable} -c "{connect}"',
            "sockets": f"{sys.executable} -c \"import socket; socket.socket(socket.AF_UNIX).connect('{local}')\"",
            "files": f"touch {tmp_path}/written",
            "processes": f"kill -0 {os.getpid()}",
            "secrets": "env | grep PYTEST_VERSION",
        }
        still_closed = {
            "secrets of the agent": "cat /proc/$PPID/environ /proc/*/environ | grep PYTEST_VERSION",
            "its mounts": f"mount -o remount,rw {tmp_path} && touch {tmp_path}/written",
            "more files": "fallocate -l 257M large",
        }
        reached = {"its folder": 'touch "$HOME/own" "$TMPDIR/own" own', "files to read": f"cat {__file__}"}
        reached |= {"files in memory": "fallocate -l 200M large"}
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        (failure,) = play("curious", prompt=closed | still_closed | reached, isolated=True).failures
        assert failure.message.endswith(f"ValueError: reached: {[*reached]}")
        assert [*tmp_path.glob("plinth-episode-*")] == []
        (failure,) = play("curious", prompt=closed, isolated=False).failures
        assert failure.message.endswith(f"ValueError: reached: {[*closed]}"), "the test does not see what is open"


def test_an_isolated_episode_is_played_as_any_other_and_ends_with_its_processes() -> None:
    sample = sample_of(play("two_turns", Policy(["one", "two"]), isolated=True))
    assert text(sample.token_ids) == "[user]hello¶[assistant]one¶[user]go on¶[assistant]two¶"
    (failure,) = play("sleeping", episode_timeout_s=3.0, isolated=True).failures
    assert failure.kind == "deadline"
    wait_until(lambda: b"sleep\x00977\x00" not in commands(), 30)  # also that of the other test with such an agent


def test_where_the_kernel_denies_namespaces_an_isolated_process_does_not_start(tmp_path: Path) -> None:
    code = """if True:
        import os, socket, sys
        from rollout_vllm.episodes import isolation
        isolation.shut_in = lambda *_: {"network": False, "files": True}
        ours, theirs = socket.socketpair()
        try:
            isolation.enter(theirs, sys.argv[1])
        except OSError as error:
            print(isolation.receive_listener(ours, 1.0), error, "HOME" in os.environ)
    """
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "None episode.isolated: the kernel denies namespaces, so the process reaches network False\n"


def test_the_memory_of_an_agent_is_limited() -> None:
    for isolated in (False, True):
        (failure,) = play("greedy", memory_bytes=1 << 28, isolated=isolated).failures
        assert "greedy: MemoryError" in failure.message


# ---- agents drawn at random ------------------------------------------------------------------------------------------
KINDS = ("append", "compact", "drop thoughts", "edit", "fork", "parallel", "retry", "hang up", "time out", "several")
ACTIONS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 7)), min_size=1, max_size=14)


class _RandomAgent:
    """An agent that takes these actions, each on one of its conversations."""

    def __init__(self, endpoint: AgentEndpoint, session: aiohttp.ClientSession, turns: Sequence[Turn]) -> None:
        self._url, self._session, self._turns = f"{endpoint.url}/chat/completions", session, turns
        self._sampled: set[str] = set()  # conversations that end with a turn of the policy
        self._headers = {"Authorization": f"Bearer {endpoint.key}"}
        self._conversations: list[list[dict[str, Any]]] = [[{"role": "user", "content": "hello"}]]

    async def take(self, action: str, number: int) -> None:
        chosen = [*self._conversations[number % len(self._conversations)]]
        if action == "compact":
            chosen = [{"role": "system", "content": "so far"}, *chosen[-2:]]
        elif action == "edit":
            chosen[number % len(chosen)] = {**chosen[number % len(chosen)], "content": "a"}
        elif action == "fork":
            chosen = chosen[: 1 + number % len(chosen)]
        elif action == "drop thoughts":
            chosen = [{"role": each["role"], "content": each["content"]} for each in chosen]
        if action in ("append", "drop thoughts", "parallel", "fork"):
            chosen.append({"role": "user", "content": "ab"[number % 2]})
        if action == "hang up":
            await self._hang_up(chosen)
        elif action == "time out":
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ask(chosen), timeout=0.002)
        elif action == "parallel":
            await asyncio.gather(*(self._ask(chosen) for _ in range(1 + number % 3)))
        elif action == "retry":
            for _ in range(2):
                await self._ask(chosen)
        else:
            await self._ask(chosen, n=1 + (action == "several"))

    async def _ask(self, messages: list[dict[str, Any]], n: int = 1) -> None:
        async with self._session.post(self._url, json={"messages": messages, "n": n}, headers=self._headers) as answer:
            body = await answer.json()
        if "choices" not in body:
            return
        turn = self._turns[int(body["id"].rpartition("-")[2])]
        before = next((some for some in (messages, messages[:-1]) if _as_key(some) in self._sampled), None)
        if before is not None:  # it goes on from the tokens that were sampled
            assert turn.parent is not None
            sampled = text(self._turns[turn.parent].sample.response_ids).rpartition("</think>")[2]
            assert sampled.rstrip("¶").strip() == before[-1]["content"].strip()
        for choice in body["choices"]:
            self._conversations.append([*messages, choice["message"]])
            self._sampled.add(_as_key(self._conversations[-1]))

    async def _hang_up(self, messages: list[dict[str, Any]]) -> None:
        body = {"messages": messages, "stream": True}
        async with self._session.post(self._url, json=body, headers=self._headers) as answer:
            async for _ in answer.content:
                answer.close()
                return


def _as_key(messages: Sequence[dict[str, Any]]) -> str:
    return json.dumps([[message["role"], message["content"].strip()] for message in messages])


@settings(deadline=None, derandomize=True, max_examples=120, phases=[Phase.generate])
@given(ACTIONS, st.sampled_from([0.0, 0.3]))
def test_no_sampled_token_is_lost_doubled_or_encoded_again(actions: list[tuple[str, int]], failing: float) -> None:
    policy: Any = Policy(failing=failing, delay_s=0.004)
    request = Request(prompt_id="p", prompt_ids=[1, 2, 3], prompt="hello", seed=7)
    episode = Episode(policy, request, 0, SamplingConfig(n=1, max_tokens=400))

    async def act() -> None:
        chat = ChatFormat(ChatTokenizer())
        endpoint = AgentEndpoint(episode, chat, hermes_calls, max_turns=40, max_context=400)
        async with endpoint, aiohttp.ClientSession() as session:
            agent = _RandomAgent(endpoint, session, episode.tree.turns)
            for action, number in actions:
                await agent.take(action, number)

    asyncio.run(act())
    assert len(episode.tree.turns) == len(policy.turns)
    if policy.turns:
        sample = episode.result(1.0)
        assert_faithful([sample], policy)
        assert Sample.from_state(json.loads(json.dumps(sample.to_state()))).to_state() == sample.to_state()
