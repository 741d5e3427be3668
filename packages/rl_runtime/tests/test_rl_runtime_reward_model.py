"""A reward model as the reward: what is refused, how its output enters the score, and real ranks that compute it."""

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_runtime_reward_model_worker import SAMPLES, STAGES
from rl_runtime_reward_service import reward_service
from rl_runtime_samples import group, sample
from rl_runtime_user_functions import Prompt

from plinth_testing import RankPool, make_classifier
from plinth_testing.errors import raises
from rl_core import ExtraRollout
from rl_data import build_tiny_model
from rl_runtime.app.reward_model import check_reward_model
from rl_runtime.config import ModelConfig
from rl_runtime.errors import InputError, RolloutFailed
from rl_runtime.job_config import JobConfig
from rl_runtime.rollout.config import DynamicSamplingConfig, EpisodeConfig
from rl_runtime.rollout.scoring import Scorer, rewards_of_rows
from rl_runtime.rollout.scoring_config import RewardTermConfig, ScoringConfig
from rl_runtime.training.policy import PolicyConfig
from rl_runtime.training.reward_model import scored_batch, with_output
from rollout_vllm import Sample

BUILTIN = ModelConfig()
TERM = {"brief": RewardTermConfig(function="length", weight=0.5, options={"limit": 9})}


def scoreable(prompt_ids: tuple[int, ...], response_ids: tuple[int, ...], score: float | None = None) -> Sample:
    return sample(response_ids, prompt=replace(Prompt("a"), token_ids=prompt_ids), text="one two", score=score)


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with the vocabulary of the built-in model, but smaller."""
    folder = build_tiny_model(tmp_path_factory.mktemp("reward"), seed=4, hidden_size=64, num_heads=2, num_kv_heads=1)
    return make_classifier(folder, seed=5)


# ----------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"model_weight": 2.0}, "model_weight"),
        ({"model": "m", "model_weight": math.inf}, "model_weight"),
        ({"model": "m", "model_weight": 0.0}, "model_weight"),
        ({"model": "m", "function": "a:b"}, "model"),
        ({"model": "m", "url": "http://a:1"}, "model"),
        ({"service": "reward_model", "url": "http://a:1"}, "model"),
        ({"service": "reward_model", "model": "m"}, "service"),
        ({"model": "m", "terms": {"model": RewardTermConfig(function="math")}}, "terms.model"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], field: str) -> None:
    with raises(InputError, field=field):
        ScoringConfig(**settings)


def test_what_needs_scores_during_the_rollout_is_refused_on_the_ranks_and_allowed_with_a_server() -> None:
    dynamic = DynamicSamplingConfig(max_rounds=1)
    on_ranks = ScoringConfig(model="m")
    with raises(InputError, field="dynamic_sampling.max_rounds", allowed="0"):
        JobConfig(reward=on_ranks, dynamic_sampling=dynamic)
    served = ScoringConfig(model="m", url="http://a:1", service="reward_model")
    assert JobConfig(reward=served, dynamic_sampling=dynamic).reward.model == "m"

    class Remax(JobConfig):
        algorithm = PolicyConfig(advantage="remax")
        extra_rollout = ExtraRollout()

    with raises(InputError, field="reward.model"):
        Remax(reward=on_ranks)


def causal(folder: Path) -> Path:
    return build_tiny_model(folder)


def two_labels(folder: Path) -> Path:
    return make_classifier(build_tiny_model(folder), num_labels=2)


def headless(folder: Path) -> Path:
    """A causal model whose config.json claims to be a classifier."""
    build_tiny_model(folder)
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def other_words(folder: Path) -> Path:
    make_classifier(build_tiny_model(folder))
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"apples"', '"planets"'))
    return folder


def short(folder: Path) -> Path:
    return make_classifier(build_tiny_model(folder, max_position_embeddings=68))


def cut(folder: Path) -> Path:
    make_classifier(build_tiny_model(folder))
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    return folder


@pytest.mark.parametrize(
    ("build", "detail"),
    [
        (lambda folder: folder, "config.json"),
        (causal, "Qwen3ForCausalLM"),
        (two_labels, "2 labels"),
        (headless, "score.weight"),
        (other_words, "planets"),
        (short, "68 tokens"),
        (cut, "model.safetensors"),
    ],
)
def test_a_folder_that_is_no_reward_model_of_this_policy_is_refused(
    tmp_path: Path, build: Callable[[Path], Path], detail: str
) -> None:
    with raises(InputError, field="reward.model") as caught:
        check_reward_model(BUILTIN, ScoringConfig(model=str(build(tmp_path))), longest=68)
    assert detail in str(caught.value)


def test_a_good_folder_passes_and_a_service_that_gives_no_score_does_not(reward_folder: Path) -> None:
    check_reward_model(BUILTIN, ScoringConfig(model=str(reward_folder)), longest=68)
    check_reward_model(BUILTIN, ScoringConfig(), longest=68)
    with reward_service() as service:  # a classifier with two labels
        served = ScoringConfig(model=str(reward_folder), url=service.url, service="reward_model", api_key="secret")
        with raises(InputError, field="reward.url", value=service.url):
            check_reward_model(BUILTIN, served, longest=68)
        with pytest.raises(InputError, match="the API key is wrong"):  # the service's own answer
            check_reward_model(BUILTIN, replace(served, api_key="wrong"), longest=68)


# ------------------------------------------------------------------- scoring


@given(
    score=st.floats(-1e6, 1e6),
    output=st.floats(-1e6, 1e6),
    weight=st.floats(-10, 10),
    terms=st.dictionaries(st.sampled_from(["a", "b"]), st.floats(-1, 1)),
)
def test_the_output_is_a_term_and_its_share_is_added(
    score: float, output: float, weight: float, terms: dict[str, float]
) -> None:
    item = replace(scoreable((1,), (2,), score), reward_terms=terms)
    scored = with_output(item, output, weight)
    assert scored.score == score + weight * output
    assert scored.reward_terms == terms | {"model": output}
    with raises(RolloutFailed, field="reward.model"):
        with_output(item, math.nan, weight)


def test_the_value_is_read_after_the_last_token_of_prompt_and_response() -> None:
    item = scoreable((5, 6), (7, 8, 1))
    batch = scored_batch([item])
    assert (batch.input_ids_T.tolist()[:5], batch.target_index_K.tolist()) == ([5, 6, 7, 8, 1], [4])


def test_functions_score_during_the_rollout_and_the_model_on_the_ranks_later() -> None:
    scored_itself = replace(scoreable((1,), (2, 3), score=4.0), sample_index=1)  # by its episode
    drafts = group([scoreable((1,), (2, 3)), scored_itself])
    with Scorer(ScoringConfig(model="m")) as alone:
        scored = asyncio.run(alone.score(drafts)).samples
    assert [(one.score, dict(one.reward_terms)) for one in scored] == [(0.0, {}), (4.0, {"episode": 4.0})]
    with Scorer(ScoringConfig(model="m", terms=TERM)) as mixed:
        scored = asyncio.run(mixed.score(drafts)).samples
    assert [(one.score, dict(one.reward_terms)) for one in scored] == [
        (0.5, {"brief": 1.0}),
        (4.5, {"episode": 4.0, "brief": 1.0}),
    ]
    assert rewards_of_rows(ScoringConfig(model="m"), EpisodeConfig()) == ()
    assert len(rewards_of_rows(ScoringConfig(model="m", terms=TERM), EpisodeConfig()) or ()) == 1


def test_a_served_model_gets_the_token_ids_and_scores_during_the_rollout(reward_folder: Path) -> None:
    with reward_service(num_labels=1) as service:
        served = ScoringConfig(
            model=str(reward_folder),
            url=service.url,
            service="reward_model",
            api_key="secret",
            model_weight=-100.0,
            terms=TERM,
        )
        check_reward_model(BUILTIN, served, longest=68)
        with Scorer(served) as scorer:
            [scored] = asyncio.run(scorer.score(group([scoreable((5, 6), (7, 8, 1))]))).samples
    assert dict(scored.reward_terms) == {"brief": 1.0, "model": 0.005}
    assert scored.score == pytest.approx(0.5 - 100 * 0.005)
    path, body = service.asked[-1]
    assert (path, body["input"], body["use_activation"]) == ("/classify", [5, 6, 7, 8, 1], False)


# --------------------------------------------------------------- real ranks


def on_ranks(two_ranks: RankPool, folder: Path, headless: Path) -> dict[tuple[int, int], list[float]]:
    """Scores of the samples, by ZeRO stage and sequence parallelism, from two ranks."""
    scores, _ = two_ranks.run("reward_scores", folder=str(folder), headless=str(build_tiny_model(headless)))
    assert scores.keys() == set(STAGES)
    return scores  # type: ignore[no-any-return]


def by_transformers(folder: Path) -> list[float]:
    """Scores of the samples, one at a time."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [float(model(torch.tensor([[*prompt, *response]])).logits[0, 0]) for prompt, response in SAMPLES]


@pytest.mark.slow
@pytest.mark.long
def test_two_ranks_compute_the_scores_of_transformers(two_ranks: RankPool, reward_folder: Path, tmp_path: Path) -> None:
    """Packed, at ZeRO stages 2 and 3, without and with sequence parallelism, in float32: within 1e-4."""
    expected = by_transformers(reward_folder)
    assert max(expected) - min(expected) > 1
    for case, scores in on_ranks(two_ranks, reward_folder, tmp_path / "headless").items():
        assert scores == pytest.approx(expected, abs=1e-4), case
