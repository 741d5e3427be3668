"""The rollout phase: failed samples (left out, never scored as zero), episodes, partial rollouts, rewards that hang."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from rl_runtime_client_loops import CLOSES_LOOPS
from rl_runtime_scripted_client import ScriptedClient, Tokenizer, phase, sample
from rl_runtime_user_functions import Prompt

from plinth_testing import raises
from rl_runtime.errors import InputError, RolloutFailed
from rl_runtime.rollout.config import EpisodeConfig, OversamplingConfig
from rl_runtime.rollout.episodes import load_rollout
from rl_runtime.rollout.groups import largest
from rl_runtime.rollout.hang_guard import HangGuard
from rl_runtime.rollout.phase import RolloutPhase
from rl_runtime.rollout.scoring import Scorer
from rl_runtime.rollout.scoring_config import ScoringConfig
from rl_runtime.training.metrics import rollout_metrics
from rollout_vllm import Group, Request, RewardOutcome, Sample, SamplingConfig, VersionSpan

pytestmark = CLOSES_LOOPS


def test_failed_samples_are_left_out_and_counted(scorer: Scorer) -> None:
    client = ScriptedClient([[2, 3], [2], [3, 2]], n=2)
    collected = phase(client, scorer).collect([Prompt("a"), Prompt("b"), Prompt("c")], SamplingConfig(n=2), step=1)
    # The second prompt kept one sample: alone it has no group to be compared with, so it goes as a whole.
    assert [item.prompt.id for item in collected.samples] == ["a", "a", "c", "c"]
    assert [item.score for item in collected.samples] == [1.0, 0.0, 0.0, 1.0]
    assert collected.num_failed == 2
    assert collected.reason == "server gone"
    assert {item.policy_version for item in collected.samples} == {3}
    assert rollout_metrics(collected)["rollout/num_retries"] == 0, "the counters that are read meanwhile"


def test_a_step_without_any_sample_is_an_error_with_the_reason(scorer: Scorer) -> None:
    with pytest.raises(RolloutFailed, match="server gone"):
        phase(ScriptedClient([[], []], n=2), scorer).collect([Prompt("a"), Prompt("b")], SamplingConfig(n=2), step=7)


def test_seeds_repeat_and_differ_between_steps_and_prompts(scorer: Scorer) -> None:
    def seeds(step: int, seed: int = 1) -> list[int | None]:
        client = ScriptedClient([[2, 2], [2, 2]], n=2)
        phase(client, scorer, seed).collect([Prompt("a"), Prompt("a")], SamplingConfig(n=2), step=step)
        return [request.seed for request in client.requests]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2), *seeds(1, seed=2)}) == 6


def test_an_episodes_context_is_masked_and_its_log_probs_are_left_out(scorer: Scorer) -> None:
    client = ScriptedClient([], n=2)
    episode = EpisodeConfig(function="rl_runtime_user_functions:two_turns")
    collected = phase(client, scorer, episode=episode).collect(
        [Prompt("a"), Prompt("b")], SamplingConfig(n=2, max_tokens=8), step=1
    )
    assert len(collected.samples) == 4
    for item in collected.samples:
        assert item.response_ids.tolist() == [2, 1, 2, 3]
        assert item.response_mask.tolist() == [True, False, False, True]
        assert item.generated_log_probs.tolist() == [-1.0, -1.5]
        assert item.num_turns == 2
        assert item.token_ids.size == 6
    assert [item.num_generated for item in collected.samples] == [2] * 4
    assert [item.generated_versions.tolist() for item in collected.samples] == [[3, 3]] * 4


def test_tools_stand_for_their_environment_also_in_a_configuration_that_was_written() -> None:
    made = EpisodeConfig(tools=("my_tools:add", "mcp:python server.py"), call_format="llama")
    assert made.environment == "rollout_vllm:ToolEnvironment"
    assert made.options == {"call_format": "llama", "tools": ["my_tools:add", "mcp:python server.py"]}
    assert replace(made) == made, "as read from config.yaml"
    with raises(InputError, field="environment", value="my_games:Game"):
        EpisodeConfig(tools=("my_tools:add",), environment="my_games:Game")
    with raises(InputError, field="options"):
        replace(made, tools=("my_tools:sub",))
    with raises(InputError, field="call_format", value="llama"):
        EpisodeConfig(environment="my_games:Game", call_format="llama")


def test_an_agents_score_is_that_of_all_its_branches(scorer: Scorer) -> None:
    episode = EpisodeConfig(agent="rl_runtime_user_functions:asks", options={"times": 3}, memory_gib=4.0)
    rollout = RolloutPhase(ScriptedClient([], n=2), Tokenizer(), scorer=scorer, seed=1, episode=episode)
    prompts = [Prompt(name) for name in ("fine", "silent", "raises")]
    collected = rollout.collect(prompts, SamplingConfig(n=2, max_tokens=32), step=1)
    assert collected.num_failed == 2
    assert collected.reason == "agent rl_runtime_user_functions:asks: KeyError: 'raises'"
    for item in collected.samples:
        assert (len(item.paths), item.num_turns, item.num_generated) == (3, 3, 3)
        assert item.score == (2.0 if item.prompt.id == "fine" else 0.0), "the configured reward scores it"
    batch = collected.batch()
    assert batch.per_sequence["sample_ids"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert batch.num_targets == 12


def test_an_environments_rewards_are_the_score_and_its_failures_cost_their_own_samples(scorer: Scorer) -> None:
    names = ["fine", "raises", "silent", "other prompt"]
    episode = EpisodeConfig(environment="rl_runtime_user_functions:Echo", max_turns=4)
    rollout = RolloutPhase(ScriptedClient([], n=2), Tokenizer(), scorer=scorer, seed=1, episode=episode)
    collected = rollout.collect([Prompt(name) for name in names], SamplingConfig(n=2, max_tokens=32), step=1)
    items = {item.prompt.id: item for item in collected.samples}
    assert len(collected.samples) == 6
    assert collected.num_failed == 2
    assert collected.reason == "environment rl_runtime_user_functions:Echo: RuntimeError: no board"
    fine = items["fine"]
    assert fine.score == 3.0
    assert fine.turn_rewards is not None
    assert fine.turn_rewards.tolist() == [1.0, 2.0]
    assert fine.num_generated == 2
    assert items["silent"].turn_rewards is None, "the configured reward scores it"
    assert items["silent"].score == 1.0
    assert bytes(items["other prompt"].prompt.token_ids) == b"ask"
    assert items["other prompt"].token_ids.size == 3 + 6


def test_episodes_that_a_step_does_not_wait_for_are_held_and_start_again_after_a_resume(scorer: Scorer) -> None:
    class HoldingClient(ScriptedClient):
        """Answers at once, but for the first turns of prompt "slow", which wait until the gate opens again."""

        async def sample(self, request: Request, sampling: SamplingConfig, *, gate: Any = None) -> Group:
            if "slow" in request.prompt_id and not self.version:
                while not self.version:
                    await asyncio.sleep(0.001)
            self.requests.append(request)
            return Group(request=request, samples=(sample(request, 0, 2),))

        async def hold(self, gate: Any) -> None:
            gate.is_open.clear()

    client = HoldingClient([], n=2)
    options: dict[str, Any] = {
        "episode": EpisodeConfig(function="rl_runtime_user_functions:rewards_itself"),
        "oversampling": OversamplingConfig(extra_prompts=1),
    }
    rollout = phase(client, scorer, **options)
    sampling = SamplingConfig(n=2, max_tokens=8)
    first = rollout.collect([Prompt("slow"), Prompt("a"), Prompt("b")], sampling, step=1)
    assert {item.prompt.id for item in first.samples} == {"a", "b"}
    assert first.metrics["rollout/num_partial_groups"] == 1
    assert rollout.num_prompts(2) == 2
    state = json.loads(json.dumps(rollout.state_dict()))
    client.version, num_requests = 1, len(client.requests)
    second = rollout.collect([Prompt("c"), Prompt("d")], sampling, step=2)
    assert "slow" in {item.prompt.id for item in second.samples} | {
        group.request.prompt.id for group in rollout._partial
    }
    assert len(client.requests) - num_requests <= 6, "the held turns are not requested again"

    resumed = phase(HoldingClient([], n=2, version=1), scorer, **options)
    resumed.load_state_dict(state)
    again = resumed.collect([Prompt("c"), Prompt("d")], sampling, step=2)
    assert len({item.prompt.id for item in again.samples}) == 2
    assert resumed.num_prompts(2) == 2


def test_a_users_reward_that_fails_leaves_the_sample_out() -> None:
    names = ["fine", "raises", "nan", "dies", "hangs", "fine too"]
    config = ScoringConfig(function="rl_runtime_user_functions:moody_reward", num_workers=2, timeout_s=1.0)
    client = ScriptedClient([[2]] * len(names), n=1)
    with Scorer(config) as scorer:
        collected = phase(client, scorer).collect([Prompt(name) for name in names], SamplingConfig(n=1), step=1)
    assert [item.prompt.id for item in collected.samples] == ["fine", "fine too"]
    assert [item.score for item in collected.samples] == [1.0, 1.0]
    assert collected.num_failed == 4
    assert "no idea" in collected.reason


def test_a_reward_that_hangs_is_named_at_once_and_ends_the_step_soon() -> None:
    """40 samples of 0.2 s with one worker: after 8 timeouts no further call is made."""
    config = ScoringConfig(function="rl_runtime_user_functions:moody_reward", timeout_s=0.2)
    with Scorer(config) as scorer:
        prompts = [Prompt("hangs")] * 40
        with pytest.raises(RolloutFailed, match="its last 8 calls"):
            phase(ScriptedClient([[2]] * 40, n=1), scorer).collect(prompts, SamplingConfig(n=1), step=1)
        with pytest.raises(RolloutFailed, match="hangs"):
            phase(ScriptedClient([[2]], n=1), scorer).validate([Prompt("fine")], SamplingConfig(n=1), step=0)


def test_timeouts_between_answers_are_tolerated() -> None:
    async def no_call(samples: Sequence[Sample]) -> Sequence[RewardOutcome]:
        return []

    guard = HangGuard(no_call, "f", whole_groups=lambda _: False, at_once=4, timeout_s=1)
    timeout, answer = RewardOutcome(None, "timeout"), RewardOutcome(1.0, "ok")
    for outcome in [answer, *[timeout] * 15, answer, *[timeout] * 15, RewardOutcome(None, "exception"), timeout]:
        guard.count(outcome)
    assert not guard.gave_up
    for _ in range(15):
        guard.count(timeout)
    assert "its last 16 calls" in guard.gave_up


def test_partial_rollouts_come_first_in_the_next_step(scorer: Scorer) -> None:
    client = ScriptedClient([], n=2)
    rollout = phase(client, scorer, oversampling=OversamplingConfig(extra_prompts=1))
    sampling = SamplingConfig(n=2)
    assert rollout.num_prompts(2) == 3
    first = rollout.collect([Prompt("a"), Prompt("b"), Prompt("c")], sampling, step=1)
    assert [item.prompt.id for item in first.samples] == ["a", "a", "b", "b"]
    assert first.num_failed == 0
    assert (first.metrics["rollout/num_partial_groups"], first.metrics["rollout/num_partial_tokens"]) == (1, 2)

    # A run that goes on from a checkpoint asks for the same.
    state = json.loads(json.dumps(rollout.state_dict()))
    client.version, client.requests = 1, []
    resumed = phase(client, scorer, oversampling=OversamplingConfig(extra_prompts=1))
    resumed.load_state_dict(state)
    assert resumed.state_dict() == rollout.state_dict()
    assert resumed.num_prompts(2) == 2
    second = resumed.collect([Prompt("d"), Prompt("e")], sampling, step=2)
    assert [item.prompt.id for item in second.samples] == ["c", "c", "d", "d"]
    went_on = client.requests[0]
    assert [sample.response_ids.tolist() for sample in went_on.samples] == [[7], [7]]
    assert went_on.samples[0].version_spans == (VersionSpan(0, 1),)

    validated = resumed.num_prompts(2)
    client.responses = [[2, 3]]
    resumed.validate([Prompt("v")], sampling, step=2)
    assert resumed.num_prompts(2) == validated, "held-out prompts have nothing to do with it"


def test_of_too_many_groups_the_fullest_are_kept_in_order() -> None:
    def kept(*sizes: int) -> list[str]:
        requests = [Request(prompt_id=str(i), prompt_ids=[1]) for i in range(len(sizes))]
        groups = [Group.fresh(request, size) for request, size in zip(requests, sizes, strict=True)]
        return [group.prompt_id for group in largest(groups, 2, at_most=2)]

    assert kept(1, 3, 2, 4) == ["1", "3"]
    assert kept(2, 2, 2, 1) == ["0", "1"]


def test_a_rollout_function_has_to_be_a_coroutine_function() -> None:
    assert load_rollout("rl_runtime_user_functions:two_turns")
    with raises(InputError, field="episode.function", allowed="`async def length_reward(episode, prompt, tokenizer)`"):
        load_rollout("rl_runtime_user_functions:length_reward")
