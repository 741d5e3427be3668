"""Reward functions are tried before a run starts: one that can score nothing is refused, no other is."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from plinth_testing import raises
from rl_data import DataConfig, Prompt, build_tiny_model
from rl_runtime import InputError, InputsConfig, ModelConfig, SupervisedConfig
from rl_runtime.app.first_prompts import check_first_prompts
from rl_runtime.app.inputs import load_ahead, policy_tokenizer
from rl_runtime.config import TaskSize
from rl_runtime.rollout import reward_trial
from rl_runtime.rollout.config import EpisodeConfig
from rl_runtime.rollout.reward_trial import has_functions, try_rewards
from rl_runtime.rollout.scoring import load_reward
from rl_runtime.rollout.scoring_config import RewardTermConfig, ScoringConfig

MODULE = "rl_runtime_reward_functions"
PROMPT = Prompt("train:0", "2 + 3\n", (1, 2), ground_truth="5", data_source="own", extra={"level": 1})


def tried(name: str, *, batched: bool = False, prompt: Prompt = PROMPT, **options: Any) -> list[str]:
    config = ScoringConfig(function=f"{MODULE}:{name}", batched=batched)
    return try_rewards(config, {"training": prompt}, tokenizer=policy_tokenizer(ModelConfig()), **options)


@pytest.mark.parametrize(
    ("name", "batched", "problem"),
    [
        ("trl", False, "TypeError: 'Prompt' object is not iterable"),
        ("trl", True, "object of type 'Prompt' has no len()"),
        ("verl_with_defaults", False, "'Prompt' object has no attribute 'strip'"),
        ("ends_its_process", False, "the worker process died (exit code 3)"),
    ],
)
def test_a_function_that_scores_no_response_is_refused(name: str, batched: bool, problem: str) -> None:
    with raises(InputError, field="reward.function", value=f"{MODULE}:{name}") as refused:
        tried(name, batched=batched)
    assert "the first prompt of training (train:0; columns in prompt.extra: level)" in refused.value.problem
    assert problem in refused.value.problem


def test_a_function_that_scores_the_response_is_accepted() -> None:
    assert tried("strict") == tried("later") == []
    assert tried("ranks", batched=True) == []


@pytest.mark.parametrize(
    "name", ["forgets_return", "text", "raises_async", "lacks_a_column", "not_a_number", "only_json", "no_service_yet"]
)
def test_a_function_that_may_score_other_responses_gets_a_warning(name: str) -> None:
    (line,) = tried(name)
    assert line.startswith(f"warning: reward.function={MODULE}:{name}: it gives no score for the first prompt of train")


def test_a_slow_function_costs_seconds_and_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_trial, "_TIMEOUT_S", 0.5)
    begin = time.monotonic()
    (line,) = tried("slow")
    assert time.monotonic() - begin < 25
    assert line.startswith("warning: ")


def test_parameters_of_another_library_are_named_even_if_the_call_works() -> None:
    (line,) = tried("trl_constant", batched=True)
    assert "trl_constant(response_texts, prompts) returns a list" in line
    assert "Its parameters (prompts, completions) are TRL's" in line
    with raises(InputError, field="reward.function", value=f"{MODULE}:verl") as refused:
        load_reward(f"{MODULE}:verl")
    assert "are verl's" in refused.value.remedy


def test_terms_are_tried_one_by_one_and_services_and_the_registry_are_not() -> None:
    registered = RewardTermConfig(function="math")
    assert not has_functions(ScoringConfig(url="http://127.0.0.1:9/score"))
    assert not has_functions(ScoringConfig(terms={"correct": registered}))
    terms = {
        "correct": registered,
        "good": RewardTermConfig(function=f"{MODULE}:strict"),
        "bad": RewardTermConfig(function=f"{MODULE}:trl", weight=0.0),
    }
    config = ScoringConfig(terms=terms, url="http://127.0.0.1:9", service="reward_model", model="nowhere")
    assert has_functions(config)
    with raises(InputError, field="reward.terms.bad.function"):
        try_rewards(config, {"training": PROMPT}, tokenizer=policy_tokenizer(ModelConfig()))


def test_a_reward_of_an_episode_that_scores_itself_is_only_warned_of() -> None:
    (line,) = tried("trl", refuses=False)
    assert line.startswith("warning: ")


@pytest.mark.parametrize("with_episode", [False, True])
def test_the_first_prompt_of_the_built_in_task_is_scored(with_episode: bool) -> None:
    """The run has written no model and no task yet. An episode that scores itself may never ask the function."""
    episode = EpisodeConfig(function="rl_runtime_user_functions:rewards_itself" if with_episode else None)
    task = TaskSize(num_train=1, num_val=1, num_demonstrations=1)

    def check(name: str) -> list[str]:
        reward = ScoringConfig(function=f"{MODULE}:{name}")
        return check_first_prompts(None, InputsConfig(task=task), episode=episode, reward=reward, seed=1)

    assert check("strict") == []
    if with_episode:
        assert check("trl")[0].startswith("warning: ")
        return
    with raises(InputError, field="reward.function"):
        check("trl")


@pytest.mark.parametrize("differs", [False, True])
def test_the_prompt_of_validation_is_scored_if_its_data_source_differs(tmp_path: Path, differs: bool) -> None:
    model = ModelConfig(path=str(build_tiny_model(tmp_path / "model")))
    sources = {"train": "own", "val": "other" if differs else "own"}
    for name, source in sources.items():
        row = {"question": "2+3", "ground_truth": "5", "data_source": source, "part": name}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    data = DataConfig(train=(str(tmp_path / "train.jsonl"),), val=(str(tmp_path / "val.jsonl"),))
    config = InputsConfig(model=model, data=data)
    inputs = load_ahead(config, SupervisedConfig(), seed=1)
    reward, episode = ScoringConfig(function=f"{MODULE}:knows_training_only"), EpisodeConfig()

    def check() -> list[str]:
        return check_first_prompts(inputs, config, episode=episode, reward=reward, seed=1)

    lines = check()
    assert len(lines) == differs
    if differs:
        assert "the first prompt of validation (val:1;" in lines[0]


def of_pattern(pattern: str) -> ScoringConfig:
    return ScoringConfig(terms={"shape": RewardTermConfig(function="format", options={"pattern": pattern})})


@pytest.mark.parametrize(
    ("reward", "question", "answer", "absent"),
    [
        (ScoringConfig(), "2 + 3", "", "####"),
        (ScoringConfig(), "2 + 3. End with #### and the number.", "", ""),
        (ScoringConfig(), "2 + 3", "It is 5. #### 5", ""),
        (ScoringConfig(method="flexible"), "2 + 3", "", ""),
        (of_pattern("<a>.*</a>"), "x", "", "<a>"),
        (of_pattern("<of_the_template>.*"), "x", "", ""),
        (of_pattern("(<a>.*</a>)?.*"), "x", "", ""),
        (ScoringConfig(function=f"{MODULE}:strict"), "2 + 3", "", ""),
    ],
)
def test_a_format_that_nothing_asks_for_is_said(
    tmp_path: Path, reward: ScoringConfig, question: str, answer: str, absent: str
) -> None:
    folder = build_tiny_model(tmp_path / "model")
    template = "{% if false %}<of_the_template>{% endif %}{{ messages[0].content }}"
    (folder / "chat_template.jinja").write_text(template)
    row = {"question": question, "ground_truth": "5", "data_source": "openai/gsm8k"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "shown.jsonl").write_text(json.dumps({"question": "1 + 1", "answer": answer or "2"}) + "\n")
    data, model = DataConfig(train=(str(tmp_path / "train.jsonl"),)), ModelConfig(path=str(folder))
    demonstrations = SupervisedConfig(files=(str(tmp_path / "shown.jsonl"),), steps=1)
    config = InputsConfig(model=model, data=data)
    inputs = load_ahead(config, demonstrations, seed=1)
    lines = check_first_prompts(inputs, config, episode=EpisodeConfig(), reward=reward, seed=1)
    assert len(lines) == bool(absent)
    assert all(absent in line and "train:1" in line and "data.instruction" in line for line in lines)
