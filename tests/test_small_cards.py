"""The presets for DeepSeek-R1-Distill-Qwen-7B fit on two GPUs with 11 GiB, by the plan of a run on such GPUs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apps.grpo.config import GrpoConfig
from apps.sft.config import SftConfig
from benchmarks.random_model import CONFIGS
from ds_engine import ModelShape
from plinth_testing import raises
from rl_runtime.launch.gpus import Gpu
from rl_runtime.resolve.job import resolve_job_for
from rl_runtime.resolve.supervised import resolve_supervised_for
from rollout_vllm import RolloutConfig
from rollout_vllm.errors import RolloutConfigError
from rollout_vllm.servers.command import server_arguments
from rollout_vllm.servers.device import check_device_features
from run_kit import ConfigError, load_config

APPS = Path(__file__).resolve().parents[1] / "apps"
QWEN2_7B = ModelShape.read(CONFIGS["qwen2-7b"])
GIB = 2**30


def cards(gib: float, number: int = 2, capability: tuple[int, int] = (7, 5)) -> tuple[Gpu, ...]:
    return (Gpu(name="card", total_bytes=int(gib * GIB), used_bytes=0, capability=capability),) * number


def grpo(*overrides: str) -> GrpoConfig:
    preset = APPS / "grpo/presets/deepseek_r1_distill_qwen_7b_grpo.yaml"
    return load_config(GrpoConfig, presets=[preset], overrides=overrides)


def sft(*overrides: str) -> SftConfig:
    preset = APPS / "sft/presets/deepseek_r1_distill_qwen_7b_sft.yaml"
    return load_config(SftConfig, presets=[preset], overrides=overrides)


@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
def test_grpo_fits_on_two_small_cards_with_its_server(capability: tuple[int, int]) -> None:
    choice = resolve_job_for(grpo(), gpus=cards(11, capability=capability), shape=QWEN2_7B)
    assert "in turns" in choice.memory
    # vLLM reserves kv_cache_gib on each GPU of the server.
    assert f"KV cache {choice.config.rollout.kv_cache_gib:.1f}" in choice.memory
    assert choice.gpu_bytes <= 0.97 * 11 * GIB
    assert choice.rank_bytes <= 7.5 * GIB, "document 4's total of a GPU"
    assert "run out of memory" not in choice.memory
    assert choice.config.actor.dtype == ("float16" if capability < (8, 0) else None)


def test_sft_fits_on_two_small_cards() -> None:
    choice = resolve_supervised_for(sft(), gpus=cards(11), shape=QWEN2_7B)
    assert choice.rank_bytes <= 0.97 * 11 * GIB
    assert "run out of memory" not in choice.memory


def test_on_larger_cards_rank_and_server_work_side_by_side() -> None:
    choice = resolve_job_for(grpo("trainer.take_turns=null"), gpus=cards(24, capability=(8, 9)), shape=QWEN2_7B)
    assert choice.config.trainer.take_turns == "never"


def test_the_server_is_told_to_round_its_base() -> None:
    arguments = server_arguments(grpo().rollout, "/model", port=1, device="cuda")
    at = arguments.index("--quantization")
    assert arguments[at : at + 4] == ["--quantization", "bitsandbytes", "--load-format", "bitsandbytes"]
    with raises(RolloutConfigError, field="quantization", value="bitsandbytes"):
        check_device_features(RolloutConfig(quantization="bitsandbytes"), "cpu")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.max_lora_rank=null", "allowed: none without rollout.max_lora_rank"),
        ("rollout.load_format=dummy", "auto with quantization=bitsandbytes"),
    ],
)
def test_a_rounded_server_that_cannot_be_pushed_to_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grpo(override)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize(("app", "preset"), [("grpo", "deepseek_r1_distill_qwen_7b_grpo")])
def test_the_preset_trains_on_cpus(app: str, preset: str, tmp_path: Path, start_app: Callable[..., Any]) -> None:
    """NF4 base, adapters, ZeRO-3 with everything in CPU memory, adapters pushed alone; sizes of the tiny overlay."""
    few = ("warm_start.steps=20", "trainer.total_training_steps=2", "trainer.val_before_train=false")
    run = start_app(tmp_path, f"preset={preset}", "overlay=tiny", "trainer.save_freq=0", *few, app=app)
    assert run.finish() == 0, run.output
    (folder,) = tmp_path.iterdir()
    header, *rows = [line.split("\t") for line in (folder / "metrics.tsv").read_text().splitlines()]
    assert "rollout/log_prob_mismatch" in header
    assert int(rows[-1][header.index("step")]) == 2
