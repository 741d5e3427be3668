"""Harnesses of others, unmodified, as agents: examples/harnesses, with the real libraries; skipped without them.

scripts/test-with.sh installs them beside .venv; .ci/run has the command.
"""

import asyncio
import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rollout_vllm_agents import ChatTokenizer, Policy
from test_rollout_vllm_agents import assert_faithful

from rollout_vllm import AgentRollout, ChatFormat, Group, Request, SamplingConfig, agent_spec, run_episodes

pytestmark = pytest.mark.slow
EXAMPLES = str(Path(__file__).parents[3] / "examples" / "harnesses")
sys.path.insert(0, EXAMPLES)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


ADD = call("add", '{"x": 17, "y": 25}')
WRITE = call("bash", '{"command": "echo $((17 + 25)) > sum; pwd; ls"}')
SUBMIT = call("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat sum"}')
CODE = "I add.\n<code>\nx = 17 + 25\nprint(x)\n</code>"
SOLVED: dict[str, tuple[list[str], int, str]] = {
    # It forgets the first two turns before the third.
    "compacting": (["take 2", "take 3", "take 3"], 2, "[user]There are 3 stones.¶[assistant]"),
    "openai_agents": ([ADD, "It is 42."], 1, "[tool]42¶"),
    "pydantic_agent": ([ADD, "It is 42."], 1, "[tool]42¶"),
    # It sends the code of a turn back as a call, so its turns are no conversation that goes on.
    "smol": ([CODE, "<code>\nfinal_answer(x)\n</code>"], 2, "Execution logs:\n42"),
    "mini_swe": ([WRITE, SUBMIT], 1, "/work\nsum\n</output>"),
}
"""Example -> the policy's turns, the paths of the episode, and what the last turn has read."""


LIBRARIES = {
    "compacting": "apps.grpo.stones",
    "openai_agents": "agents",
    "pydantic_agent": "pydantic_ai",
    "smol": "smolagents",
    "mini_swe": "minisweagent",
}
"""Example -> what it needs."""
INSTALLED = tuple(
    example
    for example, library in LIBRARIES.items()
    if find_spec(library.partition(".")[0]) and find_spec(library)  # without its parent, find_spec raises
)


@pytest.fixture(autouse=True)
def _path_of_preloaded_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python 3.11, multiprocessing's server imports them before it gets `sys.path`."""
    monkeypatch.setenv("PYTHONPATH", EXAMPLES, prepend=os.pathsep)


def play(example: str, policy: Policy) -> Group:
    if example not in INSTALLED:
        pytest.skip(f"could not import {LIBRARIES[example]}")
    spec = agent_spec(f"{example}:solve", start_timeout_s=300.0)  # it imports the library first
    rollout = AgentRollout(
        spec=replace(spec, preload=INSTALLED),  # once for all episodes: the first one starts the server that forks them
        chat=ChatFormat(ChatTokenizer()),
        max_turns=8,
        max_prompt_tokens=20_000,
    )
    question = ({"role": "user", "content": "How much is 17 + 25?"},)
    prompt = SimpleNamespace(messages=question, ground_truth="42", extra={"stones": 10, "seed": 2})
    request = Request(prompt_id="p", prompt_ids=[1], prompt=prompt, seed=7)
    client: Any = policy
    sampling = SamplingConfig(n=1, max_tokens=2_000)
    (group,) = asyncio.run(run_episodes(client, [request], lambda episode: rollout(episode, episode.prompt), sampling))
    return group


@pytest.mark.parametrize("example", SOLVED)
def test_a_harness_solves_a_task_with_the_policy_and_its_tokens_are_trained_once(example: str) -> None:
    answers, num_paths, result = SOLVED[example]
    policy = Policy(answers)
    (sample,) = play(example, policy).samples
    assert (sample.score, sample.num_turns, len(sample.paths)) == (1.0, len(answers), num_paths)
    assert result in ChatTokenizer().decode(policy.turns[-1][0])
    assert_faithful([sample], policy)


@pytest.mark.parametrize("example", SOLVED)
def test_a_policy_that_writes_anything_gets_a_score_of_0_and_loses_no_token(example: str) -> None:
    policy = Policy()  # random letters
    (sample,) = play(example, policy).samples
    assert sample.score == 0.0
    assert_faithful([sample], policy)
