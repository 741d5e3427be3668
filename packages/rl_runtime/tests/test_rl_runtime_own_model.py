"""Defaults for a user's model: one would pick them, they are written down with their reason, and given keys stay."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from ds_engine import OptimConfig
from plinth_testing import write_tiny_model
from plinth_testing.errors import raises
from rl_core import BatchConfig
from rl_data import DataConfig
from rl_runtime import InputError, JobConfig, TrainerConfig
from rl_runtime.resolve.job import resolve_steps
from rl_runtime.resolve.own_model import ModelFacts, choose_defaults, learning_rate, read_facts, response_length
from rl_runtime.resolve.resolved import ResolvedConfig
from rollout_vllm import SamplingConfig

SIZES = st.integers(1_000_000, 1_000_000_000_000)
ONE_ACTOR = {"lora": {"actor": False}, "prompt_tokens": 512, "learned_reward": False, "on_gpu": True}


@pytest.mark.parametrize(
    ("size", "rate"), [(135e6, 1e-5), (0.6e9, 4e-6), (1.7e9, 2e-6), (7e9, 1e-6), (32e9, 4e-7), (70e9, 3e-7)]
)
def test_rates_are_those_of_recipes(size: float, rate: float) -> None:
    facts = ModelFacts(num_parameters=int(size))
    assert learning_rate(facts, "actor", False)[0] == rate
    assert learning_rate(facts, "actor", True)[0] == pytest.approx(10 * rate)
    assert learning_rate(facts, "critic", False)[0] == pytest.approx(10 * rate)


@given(small=SIZES, large=SIZES)
@settings(deadline=None, derandomize=True)
def test_larger_models_take_no_larger_rates(small: int, large: int) -> None:
    small, large = sorted((small, large))
    for section in ("actor", "critic"):
        for lora in (False, True):
            rates = [learning_rate(ModelFacts(num_parameters=n), section, lora)[0] for n in (small, large)]
            assert 3e-7 <= rates[1] <= rates[0] <= 2e-4
            assert all(float(f"{rate:.0e}") == rate for rate in rates)


@given(
    context=st.none() | st.integers(2, 200_000), prompt=st.integers(1, 100_000), thinks=st.booleans(), gpu=st.booleans()
)
@settings(deadline=None, derandomize=True)
def test_a_response_fits_beside_the_longest_prompt(context: int | None, prompt: int, thinks: bool, gpu: bool) -> None:
    tokens, why = response_length(ModelFacts(context=context, thinks=thinks), prompt, on_gpu=gpu)
    assert tokens >= 1
    assert why
    if context is not None and context > prompt:
        assert tokens <= context - prompt
        assert tokens > (context - prompt) / 2 or tokens in (128, 1024, 4096)


@given(size=st.none() | SIZES, context=st.none() | st.integers(600, 100_000), learned=st.booleans(), gpu=st.booleans())
@settings(deadline=None, derandomize=True)
def test_every_choice_has_a_reason_and_a_possible_value(
    size: int | None, context: int | None, learned: bool, gpu: bool
) -> None:
    for facts in (None, ModelFacts(num_parameters=size, context=context)):
        options = ONE_ACTOR | {"learned_reward": learned, "on_gpu": gpu}
        chosen = choose_defaults(facts, **options)  # type: ignore[arg-type]
        assert all(why for _, why in chosen.values())
        SamplingConfig(n=chosen["sampling.n"][0], max_tokens=chosen["sampling.max_tokens"][0])
        OptimConfig(lr=chosen["actor.optim.lr"][0])
        assert chosen["algorithm.kl_coef"][0] == (0.01 if learned and facts else 0.0)


def test_facts_are_read_without_loading_the_model(tmp_path: Path) -> None:
    assert read_facts("builtin:tiny") is None
    assert read_facts(str(tmp_path / "missing")) == ModelFacts()
    folder = write_tiny_model(tmp_path / "model", max_position_embeddings=300)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ '<think>' }}"}))
    facts = read_facts(str(folder))
    assert facts == ModelFacts(num_parameters=facts and facts.num_parameters, context=300, thinks=True)
    assert facts.num_parameters
    assert 10_000 < facts.num_parameters < 100_000


def test_a_run_without_steps_sees_every_prompt_once(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(130 * '{"question": "1 + 1?", "answer": "#### 2"}\n')
    own = JobConfig(data=DataConfig(train=(str(file),)), batch=BatchConfig(train_batch_size=64))
    resolved = resolve_steps(ResolvedConfig(config=own))
    assert resolved.config.trainer.num_steps == 3
    assert "130" in resolved.reasons["trainer.total_training_steps"]
    assert "total_training_steps=3: " in resolved.comment()
    given = replace(own, trainer=TrainerConfig(total_training_steps=7))
    assert resolve_steps(ResolvedConfig(config=given)).config == given
    built_in = resolve_steps(ResolvedConfig(config=JobConfig())).config
    assert built_in.trainer.num_steps * built_in.batch.train_batch_size >= built_in.task.num_train
    file.unlink()
    with raises(InputError, field="data.train"):
        resolve_steps(ResolvedConfig(config=own))
