"""Every preset loads, alone and with every overlay, and has the values of the run that it documents."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import apps.distill.main
import apps.grpo.main
import apps.ppo.main
import apps.reward.main
import apps.sft.main
import rl_runtime
from apps.distill.config import DistillConfig
from apps.dpo.config import DpoConfig
from apps.grpo.config import GrpoConfig
from apps.ppo.config import PpoConfig
from apps.reward.config import RewardConfig
from apps.sft.config import SftConfig
from rl_data import build_tiny_model
from rl_runtime import JobConfig, SupervisedJobConfig, job_layout
from run_kit import load_config
from run_kit.config.loader import given_values

APPS = Path(__file__).resolve().parents[1] / "apps"
CONFIGS: dict[str, type[JobConfig]] = {"grpo": GrpoConfig, "ppo": PpoConfig, "distill": DistillConfig}
CHECKS: dict[str, Any] = {
    "grpo": apps.grpo.main.check,
    "ppo": apps.ppo.main.check,
    "distill": apps.distill.main.check,
    "reward": apps.reward.main.check,
    "dpo": rl_runtime.check_run,
}
OF_PREFERENCES: dict[str, type[SupervisedJobConfig]] = {"reward": RewardConfig, "dpo": DpoConfig}
ALGORITHMS = [
    *(("grpo", name) for name in ("grpo", "dr_grpo", "dapo", "rloo", "remax", "gspo", "cispo")),
    *(("grpo", name) for name in ("reinforce_pp", "reinforce_pp_baseline")),
    ("ppo", "ppo"),
]
"""Presets of an algorithm, which are applied over a run's."""
FILES = [(app, path.stem) for app in CONFIGS for path in sorted(APPS.glob(f"{app}/presets/*.yaml"))]
PREFERENCE_PRESETS = [(app, path.stem) for app in OF_PREFERENCES for path in sorted(APPS.glob(f"{app}/presets/*.yaml"))]
OF_IMAGES = [("grpo", "shapes"), ("grpo", "grid")]
"""Presets of a tiny model of their own, which need no overlay."""
PRESETS = [preset for preset in FILES if preset not in ALGORITHMS + OF_IMAGES]
SFT_PRESETS = sorted(path.stem for path in APPS.glob("sft/presets/*.yaml"))

GSM8K = """
model.path=Qwen/Qwen3-0.6B data.max_prompt_length=512 sampling.max_tokens=512 sampling.n=1 sampling.temperature=1.0
batch.train_batch_size=64 batch.mini_batch_size=32 batch.micro_batch_size=2 batch.token_budget=2048
algorithm.kl_coef=0.0 actor.optim.lr=1e-6 critic.optim.lr=1e-5 actor.gradient_checkpointing=true
actor.zero.fp32_grad_accum=true actor.zero.step_each_micro=false rollout.tensor_parallel_size=1
rollout.max_num_seqs=8 rollout.gpu_memory_utilization=0.2
trainer.num_ranks=2 trainer.total_training_steps=60 trainer.val_before_train=false
"""
DOCUMENTED: dict[tuple[str, str], str] = {
    ("ppo", "gsm8k"): GSM8K,
    ("ppo", "minimal"): f"{GSM8K} trainer.total_training_steps=20 actor.zero.stage=2 critic.zero.stage=2",
    ("ppo", "lora"): f"""{GSM8K} actor.lora.rank=8 actor.lora.alpha=16 actor.lora.target_modules=all-linear
        rollout.max_lora_rank=8 critic.lora=null""",
    ("ppo", "dp2_sp2"): f"""{GSM8K} batch.train_batch_size=1024 batch.mini_batch_size=128 batch.micro_batch_size=16
        actor.sequence_parallel=2 critic.sequence_parallel=2 rollout.max_num_seqs=256
        rollout.gpu_memory_utilization=0.4 trainer.num_ranks=4""",
    ("grpo", "gsm8k"): """model.path=Qwen/Qwen3-0.6B data.max_prompt_length=256 data.overlong=filter
        sampling.max_tokens=512 sampling.n=4 sampling.temperature=1.0 reward.method=flexible reward.format_score=0.1
        batch.train_batch_size=64 batch.mini_batch_size=32 batch.micro_batch_size=1 batch.token_budget=4096
        algorithm.advantage=grpo algorithm.kl_coef=0.0 actor.zero.stage=2 rollout.max_model_len=1024
        rollout.extra_args=[--max-num-batched-tokens=2048] trainer.num_ranks=2 trainer.total_training_steps=60""",
    ("grpo", "deepseek_r1_distill_qwen_7b_grpo"): """model.path=deepseek-ai/DeepSeek-R1-Distill-Qwen-7B
        data.max_prompt_length=2048 sampling.max_tokens=1024 sampling.n=4 actor.zero.stage=3
        actor.zero.offload.optimizer=cpu actor.zero.offload.param=cpu actor.lora.base_format=nf4
        actor.optim.grad_clip=1.0 rollout.tensor_parallel_size=2 rollout.quantization=bitsandbytes
        rollout.max_lora_rank=16 algorithm.rollout_correction.mode=truncate trainer.num_ranks=2""",
    **{
        ("ppo", f"zero{stage}_{kind}_offload"): f"""{GSM8K} trainer.experiment=zero{stage}_{kind}_offload
        actor.zero.stage={stage} actor.zero.offload.optimizer={optimizer} actor.zero.offload.param={param}
        critic.zero.stage={stage} critic.zero.offload.optimizer={optimizer} critic.zero.offload.param={param}"""
        for stage in (1, 2, 3)
        for kind, optimizer in (("no", "none"), ("cpu", "cpu"))
        for param in (optimizer if stage == 3 else "none",)
    },
    ("sft", "demo"): "model.path=builtin:tiny supervised.steps=300 supervised.optim.lr=2e-3",
    ("sft", "small"): "engine.zero.stage=2 engine.lora=null supervised.optim.lr=null",
    ("sft", "full_7b"): "engine.zero.stage=3 trainer.num_ranks=8 engine.gradient_checkpointing=true",
    ("sft", "lora_7b"): "engine.lora.rank=16 engine.lora.base_format=plain supervised.optim.lr=null",
    ("sft", "qlora_7b"): "engine.lora.rank=16 engine.lora.base_format=nf4",
    ("sft", "deepseek_r1_distill_qwen_7b_sft"): """model.path=deepseek-ai/DeepSeek-R1-Distill-Qwen-7B
        engine.zero.stage=2 engine.zero.offload.optimizer=cpu engine.lora.base_format=nf4 supervised.batch_size=32
        micro_batch_size=1 trainer.num_ranks=2""",
}
"""Settings that the required documents and the pages state: giving them again changes nothing."""


def preset_file(app: str, preset: str) -> Path:
    return APPS / app / "presets" / f"{preset}.yaml"


def load(app: str, preset: str, *overlays: Path) -> JobConfig:
    return load_config(CONFIGS[app], presets=[preset_file(app, preset), *overlays])


def overlay(app: str) -> Path:
    return preset_file(app, "overlays/tiny")


def at(config: object, path: str) -> Any:
    for word in path.split("."):
        config = getattr(config, word)
    return config


def test_the_preset_for_small_cards_accumulates_32_micro_batches() -> None:
    layout = job_layout(load("grpo", "deepseek_r1_distill_qwen_7b_grpo"))
    assert (layout.gradient_accumulation_steps, layout.micro_batch_size) == (32, 1)


@pytest.mark.parametrize(("app", "preset"), DOCUMENTED)
def test_a_preset_has_the_documented_values(app: str, preset: str) -> None:
    config, files = {**CONFIGS, "sft": SftConfig}[app], [preset_file(app, preset)]
    assert load_config(config, presets=files, overrides=DOCUMENTED[app, preset].split()) == load_config(
        config, presets=files
    )


@pytest.mark.parametrize(("app", "preset"), ALGORITHMS)
def test_an_algorithm_preset_sets_the_algorithm_alone_over_any_run(app: str, preset: str) -> None:
    given = given_values(CONFIGS[app], [preset_file(app, preset)])
    assert {key.partition(".")[0] for key in given} <= {"algorithm", "dynamic_sampling"}
    for run in ("demo", "gsm8k"):
        config = load(app, run, preset_file(app, preset))
        assert config.model == load(app, run).model
    assert len(CHECKS[app](load(app, "demo", preset_file(app, preset))).placement.ranks) == 2


@pytest.mark.parametrize(("app", "preset"), PRESETS)
def test_with_the_tiny_overlay_the_same_case_starts_on_two_cores(app: str, preset: str, tmp_path: Path) -> None:
    config = load(app, preset)
    tiny = load(app, preset, overlay(app))
    if isinstance(tiny, DistillConfig):
        tiny = replace(tiny, teacher=replace(tiny.teacher, model=str(build_tiny_model(tmp_path))))
    assert len(CHECKS[app](tiny).placement.ranks) == config.trainer.rank_count
    assert tiny.model.path == "builtin:tiny"
    assert tiny.actor.dtype == "float32"
    # What makes it the same case.
    assert getattr(tiny, "algorithm") == getattr(config, "algorithm")  # noqa: B009
    for engine in ("actor", "critic") if app == "ppo" else ("actor",):
        own, theirs = getattr(tiny, engine), getattr(config, engine)
        assert replace(own, dtype=theirs.dtype, optim=theirs.optim) == theirs
    assert tiny.sampling == replace(config.sampling, max_tokens=20)
    assert tiny.reward == config.reward
    layout = job_layout(tiny)
    assert layout.num_mini_batches >= 2
    assert layout.gradient_accumulation_steps >= (1 if preset == "dp2_sp2" else 2)
    assert tiny.trainer == replace(config.trainer, device="cpu", cpu_threads_per_rank=1, take_turns=None)


@pytest.mark.parametrize(("app", "preset"), PREFERENCE_PRESETS)
def test_presets_of_preference_training_start_alone_and_with_the_tiny_overlay(
    app: str, preset: str, tmp_path: Path
) -> None:
    files = [preset_file(app, preset)]
    alone, tiny = (
        load_config(OF_PREFERENCES[app], presets=paths, overrides=[f"trainer.output_dir={tmp_path}"])
        for paths in (files, [*files, overlay(app)])
    )
    for config in (alone, tiny):
        chosen = rl_runtime.resolve_supervised(config).config
        assert chosen.supervised.optim.lr == (config.supervised.optim.lr or config.learning_rates.builtin)
        assert CHECKS[app](chosen).placement.num_ranks == 2
    # What makes it the same case.
    assert at(tiny, "algorithm") == at(alone, "algorithm")
    assert replace(tiny.engine, dtype=alone.engine.dtype, gradient_checkpointing=None) == replace(
        alone.engine, gradient_checkpointing=None
    )


@pytest.mark.parametrize("preset", SFT_PRESETS)
def test_presets_of_sft_pass_the_checks_with_the_tiny_overlay(preset: str, tmp_path: Path) -> None:
    overrides = [f"trainer.output_dir={tmp_path}"]
    config = load_config(SftConfig, presets=[preset_file("sft", preset), overlay("sft")], overrides=overrides)
    resolved = rl_runtime.resolve_supervised(config)
    assert resolved.config.supervised.optim.lr == 2e-3
    assert apps.sft.main.check(resolved.config).placement.num_ranks == 2
