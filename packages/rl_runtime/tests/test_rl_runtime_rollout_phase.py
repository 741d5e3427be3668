"""The rollout phase: scoring, failed samples (left out, never scored as zero), partial rollouts, services, metrics."""

import asyncio
import inspect
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from rl_runtime.app.job_config import JobConfig
from rl_runtime.errors import InputError, RolloutFailed
from rl_runtime.experience import Experience
from rl_runtime.rollout.config import EpisodeConfig, OversamplingConfig
from rl_runtime.rollout.episodes import load_rollout
from rl_runtime.rollout.hang_guard import HangGuard
from rl_runtime.rollout.phase import RolloutMeter, RolloutPhase, ScoredGroup, largest
from rl_runtime.rollout.scoring import Scorer, load_reward
from rl_runtime.rollout.scoring_config import RewardTermConfig, ScoringConfig
from rl_runtime.training.metrics import mismatch
from rollout_vllm import (
    Failure,
    FirstGroups,
    GroupResult,
    PartialGroup,
    Request,
    RewardOutcome,
    RolloutConfig,
    Sample,
    SamplingConfig,
    VersionSpan,
)
from rollout_vllm.client.group_run import fresh_group
from rollout_vllm.episodes.remote_rewards import judge_prompt
from rollout_vllm.samples import PartialSample
from run_kit.config.redaction import yaml_without_secrets

sys.path.insert(0, str(Path(__file__).parent))  # where a user's own functions are

from rl_runtime_reward_service import quality, reward_service
from rl_runtime_user_functions import Prompt


class Tokenizer:
    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return f"#### {ids[0]}"


@dataclass
class ScriptedClient:
    """Answers with the response tokens it was given, one prompt's after the other's; missing samples are failures."""

    responses: list[list[int]]
    n: int
    requests: list[Any] = field(default_factory=list)
    version: int = 0
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

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

    async def generate_first(
        self, requests: list[Any], sampling: SamplingConfig, *, num_groups: int, keep_rest: bool, on_group: Any
    ) -> FirstGroups:
        """The first ones are complete; each of the others has one token more than it had."""
        self.requests += requests
        groups = [self._group(request, [2] * self.n) for request in requests[:num_groups]]
        for group in groups:
            on_group(group)
        rest = [r if isinstance(r, PartialGroup) else fresh_group(r, self.n) for r in requests[num_groups:]]
        grown = [replace(g, samples=tuple(self._grown(s) for s in g.samples)) for g in rest]
        return FirstGroups(groups=groups, rest=grown if keep_rest else [])

    def _grown(self, sample: PartialSample) -> PartialSample:
        spans = (*sample.version_spans, VersionSpan(self.version, 1))
        return replace(sample, response_ids=[*sample.response_ids, 7], version_spans=spans)

    async def fetch_metrics(self) -> dict[str, float]:
        return {"client/response_tokens": float(len(self.requests)), "client/num_retries": 0.0}

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)


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
    collected = phase(client, scorer).collect([Prompt("a"), Prompt("b"), Prompt("c")], SamplingConfig(n=2), step=1)
    # The second prompt kept one sample: alone it has no group to be compared with, so it goes as a whole.
    assert [item.prompt.id for item in collected.batch.items] == ["a", "a", "c", "c"]
    assert collected.batch.scores_N.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert collected.num_failed == 2
    assert collected.reason == "server gone"
    assert {item.policy_version for item in collected.batch.items} == {3}


def test_a_step_without_any_sample_is_an_error_with_the_reason(scorer: Scorer) -> None:
    with pytest.raises(RolloutFailed, match="server gone"):
        phase(ScriptedClient([[], []], n=2), scorer).collect([Prompt("a"), Prompt("b")], SamplingConfig(n=2), step=7)


def test_validation_keeps_single_samples(scorer: Scorer) -> None:
    result = phase(ScriptedClient([[2], [3]], n=1), scorer).validate(
        [Prompt("a"), Prompt("b")], SamplingConfig(n=1), step=0
    )
    assert result.accuracy == 0.5
    assert result.num_samples == 2


def test_a_validation_with_several_samples_has_pass_at_k_and_the_majority(scorer: Scorer) -> None:
    # Right is 2. The third prompt lost three samples, so that it has no pass@2 and no pass@4.
    client = ScriptedClient([[2, 3, 2, 3], [3, 3, 2, 4], [2]], n=4)
    done: list[None] = []
    result = phase(client, scorer).validate(
        [Prompt("a"), Prompt("b"), Prompt("c")],
        SamplingConfig(n=4),
        step=0,
        on_scored=lambda: done.append(None),
    )
    assert len(done) == 3
    assert [found.prompt_id for found in result.prompts] == ["a", "b", "c"]
    assert [found.votes for found in result.prompts] == [(0, 1, 0, 1), (0, 0, 2, 3), (0,)]
    assert (result.num_samples, result.num_failed, result.failure) == (9, 3, "server gone")
    assert result.prompts[2].failures == ("server gone",) * 3
    metrics = result.metrics()
    assert metrics["val/accuracy"] == metrics["val/score/mean"] == pytest.approx(4 / 9)
    assert metrics["val/pass@2"] == pytest.approx((5 / 6 + 1 / 2) / 2)
    assert metrics["val/pass@4"] == 1.0
    assert metrics["val/maj@4"] == pytest.approx((0.5 + 0.0 + 1.0) / 3)


def test_a_validation_completes_all_scores_at_once(scorer: Scorer) -> None:
    """As a reward model does; who is right, and the metrics, follow from the completed scores."""
    asked: list[int] = []

    def finish(items: Sequence[Experience]) -> list[Experience]:
        asked.append(len(items))
        return [replace(item, score=item.response_ids[0] - 2.5, reward_terms={"model": 1.0}) for item in items]

    result = phase(ScriptedClient([[2, 4], [], [3, 2]], n=2), scorer).validate(
        [Prompt("a"), Prompt("b"), Prompt("c")], SamplingConfig(n=2), step=0, finish=finish
    )
    assert asked == [4]
    assert [[s.score for s in prompt.samples] for prompt in result.prompts] == [[-0.5, 1.5], [], [0.5, -0.5]]
    assert [prompt.num_right for prompt in result.prompts] == [1, 0, 0]
    assert result.score_mean == 0.25
    assert {name for prompt in result.prompts for s in prompt.samples for name in s.terms} == {"model"}


def test_a_validation_with_one_sample_has_the_metrics_it_always_had(scorer: Scorer) -> None:
    result = phase(ScriptedClient([[2], []], n=1), scorer).validate(
        [Prompt("a"), Prompt("b")], SamplingConfig(n=1), step=0
    )
    assert result.metrics() == {
        "val/accuracy": 1.0,
        "val/score/mean": 1.0,
        "val/num_samples": 1,
        "val/num_failed": 1,
    }
    assert result.prompts[0].votes is None


def test_a_function_has_no_answers_to_vote_on() -> None:
    with Scorer(ScoringConfig(function="rl_runtime_user_functions:length_reward")) as own:
        result = phase(ScriptedClient([[2, 2]], n=2), own).validate([Prompt("a")], SamplingConfig(n=2), step=0)
    assert result.prompts[0].votes is None
    assert not any("maj" in name for name in result.metrics())


def test_an_episode_that_scores_itself_has_no_answers_to_vote_on(scorer: Scorer) -> None:
    episode = EpisodeConfig(function="rl_runtime_user_functions:rewards_itself")
    result = phase(ScriptedClient([], n=2), scorer, episode=episode).validate(
        [Prompt("a")], SamplingConfig(n=2, max_tokens=8), step=0
    )
    assert [sample.score for sample in result.prompts[0].samples] == [0.25, 0.25]
    assert result.prompts[0].votes is None


def test_a_function_of_the_user_finds_the_answers_to_vote_on() -> None:
    reward = ScoringConfig(
        function="rl_runtime_user_functions:length_reward", answer="rl_runtime_user_functions:last_word"
    )
    with Scorer(reward) as own:
        result = phase(ScriptedClient([[2, 4, 3, 2]], n=4), own).validate([Prompt("a")], SamplingConfig(n=4), step=0)
    assert result.prompts[0].votes == (0, -1, 2, 0)
    with pytest.raises(InputError, match=r"reward.answer is 'json:loads_'"):
        Scorer(replace(reward, answer="json:loads_"))


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


class EpisodeTokenizer(Tokenizer):
    """Texts of an episode: a token is a letter."""

    chat_template = None
    all_special_ids = ()
    name_or_path = "letters"

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def test_an_environments_rewards_are_the_score_and_its_failures_cost_their_own_samples(scorer: Scorer) -> None:
    names = ["fine", "raises", "silent", "other prompt"]
    episode = EpisodeConfig(environment="rl_runtime_user_functions:Echo", max_turns=4)
    rollout = RolloutPhase(ScriptedClient([], n=2), EpisodeTokenizer(), scorer=scorer, seed=1, episode=episode)
    collected = rollout.collect([Prompt(name) for name in names], SamplingConfig(n=2, max_tokens=32), step=1)
    items = {item.prompt.id: item for item in collected.batch.items}
    assert len(collected.batch.items) == 6
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
    assert items["other prompt"].num_tokens == 3 + 6


def test_a_number_that_a_rollout_function_returns_is_the_score(scorer: Scorer) -> None:
    episode = EpisodeConfig(function="rl_runtime_user_functions:rewards_itself")
    collected = phase(ScriptedClient([], n=2), scorer, episode=episode).collect(
        [Prompt("a")], SamplingConfig(n=2, max_tokens=8), step=1
    )
    assert collected.batch.scores_N.tolist() == [0.25, 0.25]


def test_episodes_that_a_step_does_not_wait_for_are_held_and_start_again_after_a_resume(scorer: Scorer) -> None:
    class HoldingClient(ScriptedClient):
        """Answers at once, but for the first turns of prompt "slow", which wait until the gate opens again."""

        async def sample(self, request: Request, sampling: SamplingConfig, *, gate: Any = None) -> GroupResult:
            if "slow" in request.prompt_id and not self.version:
                while not self.version:
                    await asyncio.sleep(0.001)
            self.requests.append(request)
            return GroupResult(prompt_id=request.prompt_id, samples=(sample(request.prompt_id, 0, 2),))

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
    assert {item.prompt.id for item in first.batch.items} == {"a", "b"}
    assert first.metrics["rollout/num_partial_groups"] == 1
    assert rollout.num_prompts(2) == 2
    state = json.loads(json.dumps(rollout.state_dict()))
    client.version, num_requests = 1, len(client.requests)
    second = rollout.collect([Prompt("c"), Prompt("d")], sampling, step=2)
    assert "slow" in {item.prompt.id for item in second.batch.items} | {p.prompt.id for p in rollout._partial}
    assert len(client.requests) - num_requests <= 6, "the held turns are not requested again"

    resumed = phase(HoldingClient([], n=2, version=1), scorer, **options)
    resumed.load_state_dict(state)
    again = resumed.collect([Prompt("c"), Prompt("d")], sampling, step=2)
    assert len({item.prompt.id for item in again.batch.items}) == 2
    assert resumed.num_prompts(2) == 2


def test_a_users_reward_that_fails_leaves_the_sample_out() -> None:
    names = ["fine", "raises", "nan", "dies", "hangs", "fine too"]
    config = ScoringConfig(function="rl_runtime_user_functions:moody_reward", num_workers=2, timeout_s=3.0)
    client = ScriptedClient([[2]] * len(names), n=1)
    with Scorer(config) as scorer:
        collected = phase(client, scorer).collect([Prompt(name) for name in names], SamplingConfig(n=1), step=1)
    assert [item.prompt.id for item in collected.batch.items] == ["fine", "fine too"]
    assert collected.batch.scores_N.tolist() == [1.0, 1.0]
    assert collected.num_failed == 4
    assert "no idea" in collected.reason


def test_a_reward_that_hangs_is_named_at_once_and_ends_the_step_soon() -> None:
    """40 samples of 0.2 s with one worker: after 4 timeouts without an answer no further call is made."""
    lines: list[str] = []
    config = ScoringConfig(function="rl_runtime_user_functions:moody_reward", timeout_s=0.2)
    with Scorer(config, report=lines.append) as scorer:
        prompts = [Prompt("hangs")] * 40
        with pytest.raises(
            RolloutFailed, match=r"step 1: reward.function=.*moody_reward hangs: its last 4 calls .*=0.2"
        ):
            phase(ScriptedClient([[2]] * 40, n=1), scorer).collect(prompts, SamplingConfig(n=1), step=1)
        with pytest.raises(RolloutFailed, match="hangs"):
            phase(ScriptedClient([[2]], n=1), scorer).validate([Prompt("fine")], SamplingConfig(n=1), step=0)
    assert len(lines) == 1
    assert lines[0].startswith(
        "warning: reward.function=rl_runtime_user_functions:moody_reward hangs: its last 1 calls"
    )


def test_timeouts_between_answers_are_tolerated() -> None:
    lines: list[str] = []

    async def no_call(drafts: Sequence[Experience]) -> Sequence[RewardOutcome]:
        return []

    guard = HangGuard(no_call, "f", whole_groups=False, at_once=2, timeout_s=1, report=lines.append)
    timeout, answer = RewardOutcome(None, "timeout"), RewardOutcome(1.0, "ok")
    for outcome in [answer, *[timeout] * 15, answer, *[timeout] * 15, RewardOutcome(None, "exception"), timeout]:
        guard.count(outcome)
    assert not guard.gave_up
    assert len(lines) == 2
    for _ in range(15):
        guard.count(timeout)
    assert "its last 16 calls" in guard.gave_up


def test_partial_rollouts_come_first_in_the_next_step(scorer: Scorer) -> None:
    client = ScriptedClient([], n=2)
    rollout = phase(client, scorer, oversampling=OversamplingConfig(extra_prompts=1))
    sampling = SamplingConfig(n=2)
    assert rollout.num_prompts(2) == 3
    first = rollout.collect([Prompt("a"), Prompt("b"), Prompt("c")], sampling, step=1)
    assert [item.prompt.id for item in first.batch.items] == ["a", "a", "b", "b"]
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
    assert [item.prompt.id for item in second.batch.items] == ["c", "c", "d", "d"]
    went_on = client.requests[0]
    assert [sample.response_ids for sample in went_on.samples] == [[7], [7]]
    assert went_on.samples[0].version_spans == (VersionSpan(0, 1),)

    validated = resumed.num_prompts(2)
    client.responses = [[2, 3]]
    resumed.validate([Prompt("v")], sampling, step=2)
    assert resumed.num_prompts(2) == validated, "held-out prompts have nothing to do with it"


def test_without_partial_rollouts_unfinished_groups_are_dropped(scorer: Scorer) -> None:
    oversampling = OversamplingConfig(extra_prompts=1, partial_rollouts=False)
    rollout = phase(ScriptedClient([], n=2), scorer, oversampling=oversampling)
    collected = rollout.collect([Prompt("a"), Prompt("b"), Prompt("c")], SamplingConfig(n=2), step=1)
    assert [item.prompt.id for item in collected.batch.items] == ["a", "a", "b", "b"]
    assert rollout.num_prompts(2) == 3


def test_of_too_many_groups_the_fullest_are_kept_in_order() -> None:
    def kept(*sizes: int) -> list[str]:
        groups = [ScoredGroup(key=str(i), num_samples=4, items=[i] * size) for i, size in enumerate(sizes)]  # type: ignore[list-item]
        return [group.key for group in largest(groups, 2, at_most=2)]

    assert kept(1, 3, 2, 4) == ["1", "3"]
    assert kept(2, 2, 2, 1) == ["0", "1"]


def test_mismatch_of_tokens_of_older_versions_is_separate(scorer: Scorer) -> None:
    batch = (
        phase(ScriptedClient([[2], [3]], n=1), scorer)
        .collect([Prompt("a"), Prompt("b")], SamplingConfig(n=1), step=1)
        .batch
    )
    older = replace(batch.items[0], version_spans=((2, 1),))
    batch = replace(batch, items=(older, batch.items[1]))
    log_probs = (batch.items[0].rollout_log_probs + 0.5, batch.items[1].rollout_log_probs + 0.25)
    metrics = mismatch(batch, log_probs)
    assert (metrics["rollout/log_prob_mismatch"], metrics["rollout/log_prob_mismatch_max"]) == (0.25, 0.25)
    assert metrics["rollout/log_prob_mismatch_stale"] == metrics["rollout/stale_token_share"] == 0.5
    assert metrics["rollout/mismatch_kl"] == pytest.approx(math.exp(0.25) - 1 - 0.25)
    assert metrics["rollout/mismatch_ess"] == 1.0


JUDGE_PROMPT = "Grade {{0 to 10}}: {prompt} {response} should be {ground_truth} in {data_source} {extra[level]}"
FIELDS = {
    "prompt": "1 + 1 =",
    "response": "#### 22",
    "ground_truth": "2",
    "data_source": "openai/gsm8k",
    "extra": {"level": 3},
}
JUDGED = judge_prompt(JUDGE_PROMPT, FIELDS, trusted=("prompt", "ground_truth", "data_source", "extra"))[0]


@pytest.mark.parametrize(
    ("settings", "path", "body", "scored"),
    [
        ({"service": "http"}, "/score", FIELDS, "#### 22"),
        ({"service": "classification", "label": 1}, "/classify", "1 + 1 =#### 22", "1 + 1 =#### 22"),
        ({"service": "pooling"}, "/pooling", "1 + 1 =#### 22", "1 + 1 =#### 22"),
        ({"service": "judge", "judge_prompt": JUDGE_PROMPT}, "/v1/chat/completions", JUDGED, JUDGED),
    ],
)
def test_a_service_of_every_kind_scores(settings: dict[str, Any], path: str, body: Any, scored: str) -> None:
    with reward_service() as service:
        url = service.url + (path if settings["service"] == "http" else "/")
        client = ScriptedClient([[22, 3], [3, 3]], n=2)
        with Scorer(ScoringConfig(url=url, api_key="secret", timeout_s=20, **settings)) as scorer:
            collected = phase(client, scorer).collect(
                [Prompt(name, extra={"level": 3}) for name in "ab"], SamplingConfig(n=2), step=1
            )
        with Scorer(ScoringConfig(url=url, api_key="wrong", timeout_s=20, **settings)) as scorer:
            client = ScriptedClient([[2]], n=1)
            with pytest.raises(RolloutFailed, match=r"no reward: .*API key"):
                phase(client, scorer).collect([Prompt("a", extra={"level": 3})], SamplingConfig(n=1), step=1)
    if path == "/v1/chat/completions":
        assert "Grade {0 to 10}: 1 + 1 = \n[text " in body
        assert "]\n#### 22\n[text " in body
        assert " should be 2 in openai/gsm8k 3\n\nGrade what stands between" in body
    texts = [item.response_text for item in collected.batch.items]
    assert texts == ["#### 22", "#### 3", "#### 3", "#### 3"]
    expected = [quality(scored) - (text != "#### 22") / 1000 for text in texts]
    assert collected.batch.scores_N.tolist() == pytest.approx(expected)
    assert collected.num_failed == 0
    assert {asked for asked, _ in service.asked} == {path}
    assert body in [_read_by(path, asked) for _, asked in service.asked]


def _read_by(path: str, body: dict[str, Any]) -> Any:
    """What of a request says which text is to be scored."""
    if path == "/v1/chat/completions":
        return body["messages"][0]["content"]
    return body if path == "/score" else body["input"]


def test_samples_without_a_score_from_the_service_are_left_out() -> None:
    with reward_service() as service:
        config = ScoringConfig(url=f"{service.url}/score", api_key="secret", timeout_s=20)
        with Scorer(config) as scorer:
            client = ScriptedClient([[2, 3], [3, 3]], n=2)
            unknown = replace(Prompt("b"), ground_truth="")
            collected = phase(client, scorer).collect([Prompt("a"), unknown], SamplingConfig(n=2), step=1)
    assert [item.prompt.id for item in collected.batch.items] == ["a", "a"]
    assert collected.num_failed == 2
    assert "no reward" in collected.reason


def test_api_keys_are_removed_from_written_configurations() -> None:
    config = JobConfig(
        rollout=RolloutConfig(urls=("http://me:third@a:1",), api_key="first"),
        reward=ScoringConfig(url="http://fourth@b:2", api_key="second"),
    )
    text = yaml_without_secrets(config)
    assert "http://***@b:2" in text
    assert not [secret for secret in ("first", "second", "third", "fourth") if secret in text]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "localhost:8000"}, "url is 'localhost:8000'"),
        ({"url": "http://a:port/score"}, "url is 'http://a:port/score'; allowed: http"),
        ({"url": "http:///score"}, "url is"),
        ({"url": "http://a/b", "function": "a:b"}, "or no function"),
        ({"url": "http://a", "service": "judge"}, "judge_prompt is null"),
        ({"service": "pooling"}, "service is 'pooling'"),
        ({"url": "http://a", "service": "judge", "judge_prompt": "{answer}"}, "judge_prompt is .*KeyError: 'answer'"),
        ({"url": "http://a", "service": "judge", "judge_prompt": 'as {"score": 1}'}, "for braces"),
        ({"url": "http://a", "service": "judge", "judge_prompt": "{}"}, "judge_prompt is"),
        ({"url": "http://a", "judge_prompt": "Grade {response}"}, "null with service=http"),
        ({"url": "http://a", "service": "pooling", "label": 1}, "label is 1"),
        ({"url": "http://a", "service": "classification", "label": -1}, "label is -1"),
        ({"batched": True}, "batched is true; allowed: false without function"),
        ({"terms": {"a": {"function": "length"}}}, "limit=None"),
        ({"terms": {"a": {"function": "nonsense"}}}, "function is 'nonsense'; allowed: gsm8k"),
        ({"terms": {"a": {"function": "math", "weight": math.inf}}}, "weight is inf"),
        ({"terms": {"a": {"function": "math", "batched": True}}}, "batched is true; allowed: false"),
        ({"terms": {"a": {"function": "math", "weight": 0}}}, "weight 0 only"),
        ({"terms": {"a b": {"function": "math"}}}, "terms.a b is a bad name"),
        (
            {"terms": {"a": {"function": "math"}}, "method": "flexible"},
            "method is flexible; allowed: strict with terms",
        ),
        ({"terms": {"episode": {"function": "math"}}}, "but not episode"),
        ({"terms": {"a": {"function": "math"}}, "function": "a:b"}, "terms is given; allowed: empty"),
        ({"terms": {"a": {"function": "code", "options": {"timeout_s": 30}}}}, "terms.a.options.timeout_s is 30"),
        ({"num_workers": 0}, "num_workers"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"start_timeout_s": 0}, "start_timeout_s"),
    ],
)
def test_scoring_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    def scoring() -> ScoringConfig:
        terms = {name: RewardTermConfig(**term) for name, term in settings.get("terms", {}).items()}
        return ScoringConfig(**{**settings, "terms": terms})

    with pytest.raises(ValueError, match=message):
        scoring()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.at_all:f", "cannot be imported"),
        ("rl_runtime_user_functions", "allowed: package.module:function"),
        ("rl_runtime_user_functions:absent", "no function 'absent'"),
        ("rl_runtime_user_functions:not_callable", "no function"),
        ("rl_runtime_user_functions:takes_too_many", "cannot be called as"),
    ],
)
def test_a_wrong_reward_is_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=f"reward.function is .*{message}"):
        load_reward(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("import os; os._exit(0)", r"os._exit\(0\)"),
        ("raise RuntimeError('no\\nlicense')", "RuntimeError: no license"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_a_module_that_does_not_import_is_refused(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sys.exit(0) in it must not end the run with success."""
    (tmp_path / "plinth_bad_reward.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    exit_process = os._exit
    with pytest.raises(InputError, match=f"reward.function is .*plinth_bad_reward cannot be imported .*{message}"):
        load_reward("plinth_bad_reward:f")
    assert os._exit is exit_process


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


def test_metrics_are_the_increase_of_counters_during_a_rollout() -> None:
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
