"""Rewards by a service: every kind of it, samples without a score, keys that no file shows."""

from typing import Any

import pytest
from rl_runtime_client_loops import CLOSES_LOOPS
from rl_runtime_reward_service import quality, reward_service
from rl_runtime_scripted_client import ScriptedClient, phase
from rl_runtime_user_functions import Prompt

from rl_runtime.errors import RolloutFailed
from rl_runtime.job_config import JobConfig
from rl_runtime.rollout.scoring import Scorer
from rl_runtime.rollout.scoring_config import ScoringConfig
from rollout_vllm import RolloutConfig, SamplingConfig
from rollout_vllm.episodes.remote_rewards import judge_prompt
from run_kit.config.redaction import yaml_without_secrets

pytestmark = CLOSES_LOOPS

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
    texts = [item.text for item in collected.samples]
    assert texts == ["#### 22", "#### 3", "#### 3", "#### 3"]
    expected = [quality(scored) - (text != "#### 22") / 1000 for text in texts]
    assert [item.score for item in collected.samples] == pytest.approx(expected)
    assert collected.num_failed == 0
    assert {asked for asked, _ in service.asked} == {path}
    assert body in [_read_by(path, asked) for _, asked in service.asked]


def _read_by(path: str, body: dict[str, Any]) -> Any:
    """The text to score, as a request gives it."""
    if path == "/v1/chat/completions":
        return body["messages"][0]["content"]
    return body if path == "/score" else body["input"]


def test_api_keys_are_removed_from_written_configurations() -> None:
    config = JobConfig(
        rollout=RolloutConfig(urls=("http://me:secret3@a:1",), api_key="secret1"),
        reward=ScoringConfig(url="http://secret4@b:2", api_key="secret2"),
    )
    text = yaml_without_secrets(config)
    assert "http://***@b:2" in text
    assert "secret" not in text
