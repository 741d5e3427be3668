"""The rule about samples that could not be generated: left out, never scored as zero."""

from dataclasses import dataclass
from typing import Any

import pytest

from rl_data import RewardConfig
from rl_runtime.errors import RolloutFailed
from rl_runtime.rollout_phase import RolloutPhase
from rollout_vllm import Failure, GroupResult, Request, Sample, SamplingConfig


@dataclass(frozen=True)
class Prompt:
    id: str
    text: str = "1 + 1 ="
    token_ids: tuple[int, ...] = (1, 2)
    ground_truth: str = "2"
    data_source: str = "openai/gsm8k"


class Tokenizer:
    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "#### 2" if ids[0] == 2 else "#### 3"


class ScriptedClient:
    """Answers with the response tokens it was given; a group's missing samples are failures."""

    def __init__(self, responses: list[list[int]], n: int) -> None:
        self._responses, self._n = responses, n
        self.requests: list[Request] = []

    def generate_blocking(self, requests: list[Request], sampling: SamplingConfig) -> list[GroupResult]:
        self.requests += requests
        return [
            GroupResult(
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
                    for i in range(len(tokens), self._n)
                ),
            )
            for request, tokens in zip(requests, self._responses, strict=True)
        ]


def sample(prompt_id: str, index: int, token: int) -> Sample:
    return Sample(
        prompt_id=prompt_id,
        sample_index=index,
        response_ids=[token],
        log_probs=[-0.5],
        finish_reason="stop",
        policy_version=3,
        last_policy_version=3,
    )


def phase(client: Any, seed: int = 1) -> RolloutPhase:
    return RolloutPhase(client, Tokenizer(), reward=RewardConfig(), seed=seed)


def test_failed_samples_are_left_out_and_counted() -> None:
    client = ScriptedClient([[2, 3], [2], [3, 2]], n=2)
    collected = phase(client).collect([Prompt("a"), Prompt("b"), Prompt("c")], SamplingConfig(n=2), step=1)
    # The second prompt kept one sample: alone it has no group to be compared with, so it goes as a whole.
    assert [item.prompt.id for item in collected.batch.items] == ["a", "a", "c", "c"]
    assert collected.batch.scores_N.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert collected.num_failed == 2
    assert {item.policy_version for item in collected.batch.items} == {3}


def test_a_step_without_any_sample_is_an_error_with_the_reason() -> None:
    with pytest.raises(RolloutFailed, match="server gone"):
        phase(ScriptedClient([[], []], n=2)).collect([Prompt("a"), Prompt("b")], SamplingConfig(n=2), step=7)


def test_validation_keeps_single_samples() -> None:
    result = phase(ScriptedClient([[2], [3]], n=1)).validate([Prompt("a"), Prompt("b")], SamplingConfig(n=1), step=0)
    assert result.accuracy == 0.5
    assert result.num_samples == 2


def test_seeds_repeat_and_differ_between_steps_and_prompts() -> None:
    def seeds(step: int, seed: int = 1) -> list[int | None]:
        client = ScriptedClient([[2, 2], [2, 2]], n=2)
        phase(client, seed).collect([Prompt("a"), Prompt("a")], SamplingConfig(n=2), step=step)
        return [request.seed for request in client.requests]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2), *seeds(1, seed=2)}) == 6
