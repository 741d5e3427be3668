"""Reward functions are tried before a run starts: one that can score nothing is refused, no other is."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rl_data import DataConfig, Prompt, build_tiny_model
from rl_runtime import InputError, ModelConfig, SupervisedConfig
from rl_runtime.app.first_prompts import check_first_prompts
from rl_runtime.app.inputs import load_ahead, policy_tokenizer
from rl_runtime.config import TaskSize
from rl_runtime.rollout.config import EpisodeConfig
from rl_runtime.rollout.reward_trial import has_functions, try_rewards
from rl_runtime.rollout.scoring import load_reward
from rl_runtime.rollout.scoring_config import RewardTermConfig, ScoringConfig

sys.path.insert(0, str(Path(__file__).parent))  # where a user's own functions are

MODULE = "rl_runtime_reward_functions"
PROMPT = Prompt("train:0", "2 + 3\n", (1, 2), ground_truth="5", data_source="own", extra={"level": 1})


def tried(name: str, *, batched: bool = False, prompt: Prompt = PROMPT, **options: Any) -> list[str]:
    config = ScoringConfig(function=f"{MODULE}:{name}", batched=batched)
    return try_rewards(config, {"training": prompt}, tokenizer=policy_tokenizer(ModelConfig()), **options)


@pytest.mark.parametrize(
    ("name", "batched", "why"),
    [
        ("trl", False, r"TypeError: 'Prompt' object is not iterable\. .* are TRL's: with reward.batched=true, name"),
        ("trl", True, r"object of type 'Prompt' has no len\(\)\. .*prompts=\[p.text for p in prompts\], completions="),
        ("verl_with_defaults", False, r"'Prompt' object has no attribute 'strip'\. .* are verl's: name a function"),
        ("forgets_return", False, "the reward is NoneType None, not a number"),
        ("text", False, "the reward is str '"),
        ("one_in_a_list", False, r"the reward is list \[.* For lists of responses and prompts: reward.batched=true"),
        ("raises", False, "ValueError: not written yet"),
        ("raises_async", False, "ValueError: not written yet"),
        ("lacks_a_column", False, r"KeyError: 'difficulty'\. .* with the columns: level"),
        ("quits", False, "SystemExit: 3"),
        ("ends_its_process", False, r"the worker process died \(exit code 3\)"),
        ("not_a_number", False, "the reward is nan, not a finite number"),
        ("too_few", True, "the batched reward has 1 values for 5 responses.*a list with a finite number for each"),
    ],
)
def test_a_function_that_scores_no_response_is_refused(name: str, batched: bool, why: str) -> None:
    where = f"^reward.function is {MODULE}:{name}, which gives no score for the first prompt of training .train:0.: "
    with pytest.raises(InputError, match=where + ".*" + why) as refused:
        tried(name, batched=batched)
    call = f"{name}(response_texts, prompts)" if batched else f"{name}(response_text, prompt)"
    assert f"It is called as {call} and returns a" in str(refused.value)


@pytest.mark.parametrize("name", ["strict", "only_json", "whole_text", "later"])
def test_a_function_that_scores_some_response_is_accepted(name: str) -> None:
    assert tried(name) == []
    assert tried("ranks", batched=True) == []


@pytest.mark.parametrize(
    "name",
    [
        "own_format",
        "own_format_without_reason",
        "own_json",
        "own_word",
        "own_type",
        "own_format_async",
        "own_format_batched",
        "no_service_yet",
    ],
)
def test_a_function_that_may_score_other_responses_gets_a_warning(name: str) -> None:
    """It worked before there was a try: whatever it raises or returns, it has used the response, or lacks a service."""
    (line,) = tried(name, batched=name.endswith("batched"))
    assert line.startswith(f"warning: reward.function is {MODULE}:{name}, which gives no score to short responses with")
    assert line.endswith("samples without a score are left out, and a step without any ends the run")


def test_a_slow_function_costs_seconds_and_is_not_refused() -> None:
    begin = time.monotonic()
    (line,) = tried("slow")
    assert time.monotonic() - begin < 30
    assert "which took longer than 5 s for the first prompt of training (train:0) and was not tried to its end" in line


def test_parameters_of_another_library_are_named_even_if_the_call_works() -> None:
    (line,) = tried("trl_constant", batched=True)
    assert f"{MODULE}:trl_constant, which is called as trl_constant(response_texts, prompts)" in line
    assert "Its parameters (prompts, completions) are TRL's" in line
    with pytest.raises(InputError, match=r"missing a required argument: 'ground_truth'\. Its parameters .* are verl's"):
        load_reward(f"{MODULE}:verl")


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
    with pytest.raises(InputError, match=r"^reward.terms.bad.function is .* with reward.terms.bad.batched=true, name"):
        try_rewards(config, {"training": PROMPT}, tokenizer=policy_tokenizer(ModelConfig()))


def test_a_reward_of_an_episode_that_scores_itself_is_only_warned_of() -> None:
    (line,) = tried("raises", refuses=False)
    assert line.startswith("warning: ")


@pytest.mark.parametrize("with_episode", [False, True])
def test_the_first_prompt_of_the_built_in_task_is_scored(with_episode: bool) -> None:
    """The run has written no model and no task yet. An episode that scores itself may never ask the function."""
    episode = EpisodeConfig(function="rl_runtime_user_functions:rewards_itself" if with_episode else None)
    task = TaskSize(num_train=1, num_val=1, num_demonstrations=1)

    def check(name: str) -> list[str]:
        reward = ScoringConfig(function=f"{MODULE}:{name}")
        return check_first_prompts(None, ModelConfig(), DataConfig(), task, episode=episode, reward=reward, seed=1)

    assert check("strict") == []
    if with_episode:
        assert check("raises")[0].startswith("warning: ")
        return
    with pytest.raises(InputError, match=r"for the first prompt of training \(train:0\): ValueError: not written yet"):
        check("raises")


@pytest.mark.parametrize("differs", [False, True])
def test_the_prompt_of_validation_is_scored_if_its_data_source_differs(tmp_path: Path, differs: bool) -> None:
    model = ModelConfig(path=str(build_tiny_model(tmp_path / "model")))
    sources = {"train": "own", "val": "other" if differs else "own"}
    for name, source in sources.items():
        row = {"question": "2+3", "ground_truth": "5", "data_source": source, "part": name}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    data = DataConfig(train=(str(tmp_path / "train.jsonl"),), val=(str(tmp_path / "val.jsonl"),))
    inputs = load_ahead(model, data, SupervisedConfig(), TaskSize(), seed=1)
    reward, episode = ScoringConfig(function=f"{MODULE}:knows_training_only"), EpisodeConfig()

    def check() -> list[str]:
        return check_first_prompts(inputs, model, data, TaskSize(), episode=episode, reward=reward, seed=1)

    if differs:
        with pytest.raises(InputError, match=r"for the first prompt of validation \(val:1\): KeyError: 'val'"):
            check()
    else:
        assert check() == []
