"""Episodes that score themselves: rewards of rollout functions, and environments in processes of their own."""

from __future__ import annotations

import asyncio
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_vllm_helpers import ByteTokenizer, group_of_one

from rollout_vllm import (
    ChatFormat,
    EnvironmentRollout,
    EnvironmentSpec,
    Episode,
    Group,
    Request,
    SamplingConfig,
    run_episodes,
)

QUICK = settings(deadline=None, derandomize=True)
EOS = 256


class FakeClient:
    """Samples `answer` for every turn."""

    def __init__(self, answer: str = "go") -> None:
        self.answer = [*answer.encode(), EOS]
        self.prompts: list[str] = []

    async def sample(self, request: Request, sampling: SamplingConfig) -> Group:
        await asyncio.sleep(0)
        self.prompts.append(bytes(token for token in request.prompt_ids if token != EOS).decode())
        ids = self.answer[: sampling.response_tokens]
        return group_of_one(request, ids, log_prob=-0.5, version=3)


def run(
    function: Callable[[Episode], Any],
    prompts: Sequence[str] = ("p",),
    *,
    n: int = 1,
    max_tokens: int = 64,
    **options: Any,
) -> list[Group]:
    client: Any = options.pop("client", None) or FakeClient()
    requests = [Request(prompt_id=prompt, prompt_ids=list(prompt.encode())) for prompt in prompts]
    return asyncio.run(run_episodes(client, requests, function, SamplingConfig(n=n, max_tokens=max_tokens), **options))


def play(name: str, prompts: Sequence[str] = ("p",), *, max_turns: int = 8, **options: Any) -> list[Group]:
    spec_keys = {"options", "start_timeout_s", "step_timeout_s"} & options.keys()
    spec = EnvironmentSpec(path=f"rollout_vllm_environments:{name}", **{key: options.pop(key) for key in spec_keys})
    rollout = EnvironmentRollout(spec=spec, chat=ChatFormat(ByteTokenizer()), max_turns=max_turns)
    return run(lambda episode: rollout(episode, episode.prompt_id), prompts, **options)


def reasons(groups: Sequence[Group]) -> dict[str, str]:
    return {group.prompt_id: failure.message for group in groups for failure in group.failures}


# ---- rewards of rollout functions ------------------------------------------------------------------------------------
@QUICK
@given(st.lists(st.lists(st.floats(-8, 8, width=32), max_size=3), min_size=1, max_size=5), st.floats(-8, 8) | st.none())
def test_rewards_are_at_the_last_token_of_their_turn(rewards: list[list[float]], returned: float | None) -> None:
    async def function(episode: Episode) -> float | None:
        for turn in rewards:
            await episode.generate()
            episode.add_context([1, 2])
            for value in turn:
                episode.reward(value)
        return returned

    (result,) = run(function)[0].samples
    turns = [list(turn) for turn in rewards]
    if returned is not None:
        turns[-1].append(returned)
    if not any(turns):
        assert result.turn_rewards is None
        assert result.score is None
        return
    assert result.turn_rewards is not None
    assert result.score is not None
    assert len(result.turn_rewards) == result.num_generated == 3 * len(rewards)
    assert result.turn_rewards.tolist() == pytest.approx([v for turn in turns for v in (0.0, 0.0, sum(turn))])
    assert result.score == pytest.approx(sum(map(sum, turns)), abs=1e-9)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (math.nan, "nan, not a finite number"),
        (math.inf, "inf, not a finite number"),
        ("1.0", "str '1.0', not a number"),
        ([1.0], "list [1.0], not a number"),
        (1e39, "1e+39; allowed: -1e+30 to 1e+30"),
        (10**400, "inf, not a finite number"),
    ],
)
def test_a_wrong_reward_fails_its_own_sample(value: Any, why: str) -> None:
    async def function(episode: Episode) -> Any:
        await episode.generate()
        return value if episode.prompt_id == "bad" else 1

    bad, good = run(function, ["bad", "good"], n=2)
    assert len(bad.failures) == len(good.samples) == 2
    assert why in bad.failures[0].message
    assert good.samples[0].score == 1.0


def test_an_error_without_a_message_and_rewards_that_add_up_too_high_fail_their_own_sample() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise KeyError("no message")

    async def function(episode: Episode) -> float:
        await episode.generate()
        if episode.prompt_id == "silent":
            raise Silent
        episode.reward(0.9e30)
        return 0.9e30

    silent, high = run(function, ["silent", "high"])
    assert silent.failures[0].message == "Silent: its __str__ raised KeyError"
    assert high.failures[0].message == "ValueError: the reward is 1.8e+30; allowed: -1e+30 to 1e+30"


def test_a_reward_needs_a_turn_and_a_prompt_is_not_replaced_in_the_middle() -> None:
    async def too_early(episode: Episode) -> None:
        episode.reward(1.0)

    async def too_late(episode: Episode) -> None:
        await episode.generate()
        episode.replace_prompt([1])

    assert "before the first turn" in run(too_early)[0].failures[0].message
    assert "the response has begun" in run(too_late)[0].failures[0].message


def test_at_most_max_concurrent_episodes_run() -> None:
    running = peak = 0

    async def function(episode: Episode) -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.01)
        await episode.generate()
        running -= 1

    groups = run(function, ["a", "b", "c"], n=4, max_concurrent=5)
    assert sum(len(group.samples) for group in groups) == 12
    assert peak == 5


# ---- environments ----------------------------------------------------------------------------------------------------
def test_an_environment_plays_and_scores(tmp_path: Path) -> None:
    log = tmp_path / "log"
    client = FakeClient()
    (group,) = play("Counter", ["p"], n=2, options={"log": str(log)}, client=client)
    for result in group.samples:
        assert bytes(i for i in result.response_ids.tolist() if i != EOS).decode() == "gogo!gogo!go"
        assert result.turn_rewards.tolist() == [0, 0, 1, 0, 0, 2, 0, 0, 3]
        assert (result.score, result.num_turns, result.finish_reason) == (6.0, 3, "stop")
        assert result.data == {"count": 3}
        assert bytes(result.prompt_ids.tolist()).decode() == "p"
    assert log.read_text() == "closed p after 3\n" * 2


def test_coroutines_five_values_and_a_prompt_of_its_own() -> None:
    client = FakeClient()
    (group,) = play("AsyncCounter", client=client, options={"num_turns": 2})
    assert client.prompts == ["again", "againgogo!"]
    assert bytes(group.samples[0].prompt_ids.tolist()).decode() == "again"
    assert group.samples[0].score == 3.0


def test_an_environment_without_rewards_leaves_scoring_to_others() -> None:
    (group,) = play("Silent")
    assert group.samples[0].score is None
    assert group.samples[0].num_turns == 3


@pytest.mark.parametrize(("max_turns", "max_tokens", "num_turns"), [(2, 64, 2), (8, 13, 3)])
def test_an_endless_environment_is_cut_by_turns_or_tokens(max_turns: int, max_tokens: int, num_turns: int) -> None:
    (group,) = play("Endless", max_turns=max_turns, max_tokens=max_tokens)
    (result,) = group.samples
    assert (result.num_turns, result.finish_reason) == (num_turns, "length")
    assert result.response_mask[-1], "nothing follows the last turn"
    assert result.score == sum(range(1, num_turns + 1))


def test_an_environment_that_is_cut_may_give_a_last_reward() -> None:
    good, bad = play("CutCounter", ["good", "nan"], max_turns=3)
    assert good.samples[0].score == 1.0 + 2.0 + 3.0 + 10.0
    assert "cut(): the reward is nan, not a finite number" in bad.failures[0].message


def test_an_endless_environment_is_cut_by_time() -> None:
    (group,) = play("Endless", max_turns=10**9, max_tokens=10**9, episode_timeout_s=1.0)
    assert group.failures[0].kind == "deadline"
    assert group.failures[0].message == "not finished within 1 s"


def test_each_way_to_fail_is_named_and_costs_its_own_sample(tmp_path: Path) -> None:
    """All at once, with some that are fine; then nothing is left running."""
    token = f"left-behind-{time.monotonic_ns()}"
    expected = {
        "raises": "RuntimeError: no idea",
        "exits": "SystemExit: 3",
        "dies": "its process died (exit code 3)",
        "killed": "its process died (exit code -9)",
        "nan": "step(): the reward is nan, not a finite number",
        "string": "step(): the reward is str '1.0', not a number",
        "nothing": "step() returned 'None' (NoneType); allowed: (observation, reward, done, info)",
        "three values": "(tuple); allowed: (observation",
        "number as text": "step() returned '7' (int); allowed: text, a list of messages, or None",
        "megabytes": "returned more than 16 MiB",
        "reset raises": "RuntimeError: no board",
        "reset returns bytes": "reset() returned",
    }
    fine = ["fine", "prints", "forks", "leaves a process"]
    log = str(tmp_path / token)
    hangs = dict.fromkeys(("hangs", "ignores signals"), "a step took longer than episode.step_timeout_s=1")
    groups = play("Moody", [*expected, *fine], options={"log": log})
    failed = reasons(groups) | reasons(play("Moody", list(hangs), step_timeout_s=1.0, options={"log": log}))
    expected |= hangs
    assert failed.keys() == expected.keys()
    for name, why in expected.items():
        assert failed[name].startswith("environment rollout_vllm_environments:Moody: "), failed[name]
        assert why in failed[name]
    assert {group.samples[0].score for group in groups if group.samples} == {6.0}
    closed = Path(log).read_text().splitlines()
    assert {"closed raises after 2", "closed nan after 2", "closed fine after 3"} <= set(closed)
    assert not any(line.startswith("closed hangs") for line in closed)
    left = subprocess.run(["pgrep", "-f", token], capture_output=True, text=True, check=False).stdout
    assert left == ""


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("SlowStart", {"start_timeout_s": 1.0}, "its start took longer than episode.start_timeout_s=1"),
        ("NeedsAnOption", {}, "TypeError: .*missing 1 required positional argument: 'size'"),
        ("Nobody", {}, "AttributeError"),
        ("Counter", {"options": {"log": lambda: 0}}, "cannot be started: .*pickle"),
    ],
)
def test_an_environment_that_does_not_start_is_named(name: str, options: dict[str, Any], why: str) -> None:
    (group,) = play(name, **options)
    assert re.match(f"environment rollout_vllm_environments:{name}: .*{why}", group.failures[0].message)


def test_a_cancelled_run_leaves_no_environment_behind() -> None:
    """The rollout is cancelled while environments start, and while they play."""

    def descendants() -> int:
        listing = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
        children: dict[int, list[int]] = {}
        for pid, parent, command in (line.split(None, 2) for line in listing.splitlines()):
            if not command.startswith("ps "):
                children.setdefault(int(parent), []).append(int(pid))
        pids = [os.getpid()]
        for own in pids:
            pids += children.get(own, [])
        return len(pids)

    async def cancelled(after_s: float) -> None:
        spec = EnvironmentSpec(path="rollout_vllm_environments:Endless")
        rollout = EnvironmentRollout(spec=spec, chat=ChatFormat(ByteTokenizer()), max_turns=10**9)
        client: Any = FakeClient()
        requests = [Request(prompt_id="p", prompt_ids=[1])]
        task = asyncio.create_task(
            run_episodes(client, requests, lambda e: rollout(e, "p"), SamplingConfig(n=4, max_tokens=10**9))
        )
        await asyncio.sleep(after_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    play("Counter")  # the server that forks environments has started
    before = descendants()
    for after_s in (0.0, 0.005, 0.02, 0.5):
        asyncio.run(cancelled(after_s))
        assert descendants() == before


def test_what_the_main_module_imports_is_imported_once_for_all_environments(tmp_path: Path) -> None:
    """By `python -m`, as the apps are started: multiprocessing imports the main module in every process."""
    (tmp_path / "slow_import.py").write_text(
        "import os\n\nwith open('imports', 'a') as file:\n    print(os.getpid(), file=file)\n"
    )
    (tmp_path / "trains.py").write_text(
        "import asyncio\n"
        "import slow_import\n"
        "from rollout_vllm import EnvironmentSpec\n"
        "from rollout_vllm.episodes.environment_process import EnvironmentProcess\n\n"
        "COUNTER = EnvironmentSpec(path='rollout_vllm_environments:Counter')\n\n\n"
        "async def play():\n"
        "    async with EnvironmentProcess(COUNTER, 'p') as environment:\n"
        "        return (await environment.step('go')).reward\n\n\n"
        "async def main():\n"
        "    return await asyncio.gather(*(play() for _ in range(4)))\n\n\n"
        "if __name__ == '__main__':\n"
        "    assert asyncio.run(main()) == [1.0] * 4\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    subprocess.run(
        [sys.executable, "-m", "trains"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, check=True, timeout=120
    )
    assert len((tmp_path / "imports").read_text().splitlines()) == 2, "this process and the server that forks"


def test_environments_start_with_a_temporary_folder_whose_path_is_long(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    code = """
import multiprocessing, tempfile
from rollout_vllm.episodes.environment_process import shorten_socket_paths
shorten_socket_paths()
process = multiprocessing.get_context("forkserver").Process(target=print, args=("started",))
process.start()
process.join(30)
print(tempfile.gettempdir())
"""
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["started", str(folder)], done.stderr
    assert list(folder.iterdir()) == []
