"""What becomes of answers: scored beside generation, left out and never scored as zero when something failed."""

import asyncio
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rl_runtime.config import EpisodeConfig, ScoringConfig
from rl_runtime.errors import InputError, RolloutFailed
from rl_runtime.rollout_meter import RolloutMeter
from rl_runtime.rollout_phase import RolloutPhase, load_rollout
from rl_runtime.scoring import Scorer, load_reward
from rollout_vllm import Failure, GroupResult, Request, Sample, SamplingConfig

sys.path.insert(0, str(Path(__file__).parent))  # where a user's own functions are

from rl_runtime_user_functions import Prompt


class Tokenizer:
    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "#### 2" if ids[0] == 2 else "#### 3"


@dataclass
class ScriptedClient:
    """Answers with the response tokens it was given, one prompt's after the other's; missing samples are failures."""

    responses: list[list[int]]
    n: int
    requests: list[Request] = field(default_factory=list)

    async def generate(self, requests: list[Request], sampling: SamplingConfig, *, on_group: Any) -> list[GroupResult]:
        self.requests += requests
        groups = [self._group(request, ids) for request, ids in zip(requests, self.responses, strict=True)]
        for group in reversed(groups):  # the order of completion is not that of the prompts
            answer = on_group(group)
            if inspect.isawaitable(answer):
                await answer
        return groups

    def _group(self, request: Request, tokens: list[int]) -> GroupResult:
        return GroupResult(
            prompt_id=request.prompt_id,
            samples=tuple(sample(request.prompt_id, i, token) for i, token in enumerate(tokens)),
            failures=tuple(
                Failure(
                    prompt_id=request.prompt_id,
                    sample_index=i,
                    kind="connection",
                    message="server gone",
                    num_attempts=1,
                )
                for i in range(len(tokens), self.n)
            ),
        )

    async def sample(self, request: Request, sampling: SamplingConfig) -> GroupResult:
        self.requests.append(request)
        token = 2 if len(request.prompt_ids) == 2 else 3
        return GroupResult(prompt_id=request.prompt_id, samples=(sample(request.prompt_id, 0, token),))

    async def fetch_metrics(self) -> dict[str, float]:
        return {"client/response_tokens": float(len(self.requests)), "client/num_retries": 0.0}

    async def aclose(self) -> None:
        pass


def sample(prompt_id: str, index: int, token: int) -> Sample:
    return Sample(
        prompt_id=prompt_id,
        sample_index=index,
        response_ids=[token],
        log_probs=[-0.5 * token],
        finish_reason="stop",
        policy_version=3,
        last_policy_version=3,
    )


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    with Scorer(ScoringConfig()) as scorer:
        yield scorer


def phase(client: Any, scorer: Scorer, seed: int = 1, **options: Any) -> RolloutPhase:
    return RolloutPhase(client, Tokenizer(), scorer=scorer, seed=seed, **options)


def test_failed_samples_are_left_out_and_counted(scorer: Scorer) -> None:
    client = ScriptedClient([[2, 3], [2], [3, 2]], n=2)
    with phase(client, scorer) as rollout:
        collected = rollout.collect([Prompt("a"), Prompt("b"), Prompt("c")], SamplingConfig(n=2), step=1)
    # The second prompt kept one sample: alone it has no group to be compared with, so it goes as a whole.
    assert [item.prompt.id for item in collected.batch.items] == ["a", "a", "c", "c"]
    assert collected.batch.scores_N.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert collected.num_failed == 2
    assert collected.reason == "server gone"
    assert {item.policy_version for item in collected.batch.items} == {3}


def test_a_step_without_any_sample_is_an_error_with_the_reason(scorer: Scorer) -> None:
    with pytest.raises(RolloutFailed, match="server gone"), phase(ScriptedClient([[], []], n=2), scorer) as rollout:
        rollout.collect([Prompt("a"), Prompt("b")], SamplingConfig(n=2), step=7)


def test_validation_keeps_single_samples(scorer: Scorer) -> None:
    with phase(ScriptedClient([[2], [3]], n=1), scorer) as rollout:
        result = rollout.validate([Prompt("a"), Prompt("b")], SamplingConfig(n=1), step=0)
    assert result.accuracy == 0.5
    assert result.num_samples == 2


def test_seeds_repeat_and_differ_between_steps_and_prompts(scorer: Scorer) -> None:
    def seeds(step: int, seed: int = 1) -> list[int | None]:
        client = ScriptedClient([[2, 2], [2, 2]], n=2)
        with phase(client, scorer, seed) as rollout:
            rollout.collect([Prompt("a"), Prompt("a")], SamplingConfig(n=2), step=step)
        return [request.seed for request in client.requests]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2), *seeds(1, seed=2)}) == 6


def test_an_episodes_context_is_masked_and_its_log_probs_are_left_out(scorer: Scorer) -> None:
    client = ScriptedClient([], n=2)
    episode = EpisodeConfig(function="rl_runtime_user_functions:two_turns")
    with phase(client, scorer, episode=episode) as rollout:
        collected = rollout.collect([Prompt("a"), Prompt("b")], SamplingConfig(n=2, max_tokens=8), step=1)
    assert len(collected.batch.items) == 4
    for item in collected.batch.items:
        assert item.response_ids == (2, 1, 2, 3)
        assert item.response_mask is not None
        assert item.response_mask.tolist() == [True, False, False, True]
        assert item.rollout_log_probs.tolist() == [-1.0, -1.5]
        assert item.num_turns == 2
        assert item.num_tokens == 6
    assert collected.batch.response_lens_N.tolist() == [2] * 4
    assert sum(n for item in collected.batch.items for _, n in item.version_spans) == 8


def test_a_users_reward_that_fails_leaves_the_sample_out() -> None:
    names = ["fine", "raises", "nan", "dies", "hangs", "fine too"]
    config = ScoringConfig(function="rl_runtime_user_functions:moody_reward", num_workers=2, timeout_s=3.0)
    client = ScriptedClient([[2]] * len(names), n=1)
    with Scorer(config) as scorer, phase(client, scorer) as rollout:
        collected = rollout.collect([Prompt(name) for name in names], SamplingConfig(n=1), step=1)
    assert [item.prompt.id for item in collected.batch.items] == ["fine", "fine too"]
    assert collected.batch.scores_N.tolist() == [1.0, 1.0]
    assert collected.num_failed == 4
    assert "no idea" in collected.reason


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.at_all:f", "cannot be imported"),
        ("rl_runtime_user_functions", "allowed: package.module:function"),
        ("rl_runtime_user_functions:absent", "no function 'absent'"),
        ("rl_runtime_user_functions:not_callable", "no function"),
        ("rl_runtime_user_functions:takes_too_many", "cannot be called as"),
        ("rl_runtime_user_functions:two_turns", "is a coroutine function"),
    ],
)
def test_a_wrong_reward_is_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=f"reward.function is .*{message}"):
        load_reward(name)


def test_a_rollout_function_has_to_be_a_coroutine_function() -> None:
    assert load_rollout("rl_runtime_user_functions:two_turns")
    with pytest.raises(InputError, match=r"no coroutine function; write `async def length_reward\(episode, prompt"):
        load_rollout("rl_runtime_user_functions:length_reward")


@dataclass
class CountingClient:
    readings: list[dict[str, float]]

    async def fetch_metrics(self) -> dict[str, float]:
        return self.readings.pop(0)


async def read_all(readings: list[dict[str, float]]) -> list[dict[str, float]]:
    meter = RolloutMeter(CountingClient(list(readings)))  # type: ignore[arg-type]
    return [await meter.read(2.0) for _ in readings]


def test_metrics_are_what_a_rollout_gained() -> None:
    base = {"client/num_retries": 1.0, "num_running": 0.0, "num_waiting": 0.0}
    first, second, third = asyncio.run(
        read_all(
            [
                base | {"client/response_tokens": 100.0, "prefix_cache_queries": 10.0, "prefix_cache_hits": 1.0},
                base | {"client/response_tokens": 300.0, "prefix_cache_queries": 30.0, "prefix_cache_hits": 11.0},
                # The server was started again: its counters begin at zero.
                base | {"client/response_tokens": 400.0, "prefix_cache_queries": 4.0, "prefix_cache_hits": 2.0},
            ]
        )
    )
    assert first["rollout/tokens_per_s"] == 50
    assert second["rollout/tokens_per_s"] == 100
    assert second["rollout/prefix_cache_hit_rate"] == 0.5
    assert second["rollout/num_retries"] == 0
    assert "rollout/prefix_cache_hit_rate" not in third
    assert "rollout/num_preemptions" not in third
