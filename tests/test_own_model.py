"""The apps write down what they chose for a user's model, and leave what was given."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from apps.grpo.config import GrpoConfig
from apps.ppo.config import PpoConfig
from ds_engine import EngineConfig, LoraConfig, OptimConfig
from rl_data import DataConfig
from rl_runtime import ModelConfig
from rl_runtime.app.cli import run_job_cli
from rl_runtime.resolve.job import resolve_job_for
from rl_runtime.resolve.own_model import ModelFacts
from rollout_vllm import SamplingConfig


def test_a_run_writes_what_was_chosen_and_leaves_what_was_given() -> None:
    facts = ModelFacts(num_parameters=600_000_000, context=2048)
    config = GrpoConfig(model=ModelConfig(path="own"), data=DataConfig(train=("a.jsonl",), max_prompt_length=1536))
    resolved = resolve_job_for(config, gpus=(), shape=None, facts=facts)
    after = resolved.config
    assert (after.actor.optim.lr, after.sampling.n, after.sampling.max_tokens) == (4e-6, 4, 128)
    assert (after.validation.n, after.validation.max_tokens, after.algorithm.kl_coef) == (1, 128, 0.0)
    assert "actor.optim.lr=4e-06: 600M parameters" in resolved.comment()
    assert "sampling.max_tokens=128: responses on the CPU are slow" in resolved.comment()
    adapters = replace(config, actor=replace(config.actor, lora=LoraConfig()))
    resolved = resolve_job_for(adapters, gpus=(), shape=None, facts=facts)
    assert resolved.config.actor.optim.lr == 4e-5
    assert "actor.optim.lr=4e-05: 600M parameters, LoRA" in resolved.comment()
    given = replace(
        config,
        actor=EngineConfig(optim=OptimConfig(lr=3e-5), lora=LoraConfig()),
        sampling=SamplingConfig(n=2, max_tokens=77),
        algorithm=replace(config.algorithm, kl_coef=0.04),
    )
    after = resolve_job_for(given, gpus=(), shape=None, facts=facts).config
    assert (after.actor.optim.lr, after.sampling.n, after.sampling.max_tokens) == (3e-5, 2, 77)
    assert (after.validation.max_tokens, after.algorithm.kl_coef) == (77, 0.04)


def test_a_critic_gets_a_rate_of_its_own() -> None:
    config = PpoConfig(model=ModelConfig(path="own"), data=DataConfig(train=("a.jsonl",)))
    after = resolve_job_for(config, gpus=(), shape=None, facts=ModelFacts(num_parameters=7 * 10**9)).config
    assert (after.actor.optim.lr, after.critic.optim.lr) == (1e-6, 1e-5)


@pytest.mark.parametrize(
    ("config_cls", "argv", "gpus", "model"),
    [
        (GrpoConfig, [], ["nvidia0"], "fetched:smollm2"),
        (GrpoConfig, [], [], "builtin:tiny"),
        (GrpoConfig, ["preset=demo"], ["nvidia0"], "builtin:tiny"),
        (GrpoConfig, ["model.path=own", "data.train=[rows.jsonl]"], ["nvidia0"], "own"),
        (PpoConfig, [], ["nvidia0"], "builtin:tiny"),
    ],
)
def test_without_keys_a_gpu_host_trains_the_pretrained_model(
    config_cls: type[Any],
    argv: list[str],
    gpus: list[str],
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, pattern: gpus if self == Path("/dev") else glob(self, pattern))
    with pytest.raises(SystemExit) as ended:
        run_job_cli(config_cls, lambda _: None, [*argv, "--print-config"])
    assert ended.value.code in (0, None)
    assert yaml.safe_load(capsys.readouterr().out)["model"]["path"] == model
