"""docs/recipes begin with commands that load and fit, presets for small cards fit, and quoted messages are printed."""

import re
import shlex
from pathlib import Path

import pytest

from apps.grpo.config import GrpoConfig
from apps.sft.config import SftConfig
from ds_engine import ModelShape
from plinth_testing import models, raises
from rl_runtime.launch.gpus import Gpu
from rl_runtime.resolve.job import resolve_job_for
from rl_runtime.resolve.supervised import resolve_supervised_for
from rollout_vllm import RolloutConfig
from rollout_vllm.errors import RolloutConfigError
from rollout_vllm.servers.command import server_arguments
from rollout_vllm.servers.device import check_device_features
from run_kit import ConfigError, load_config

REPO = Path(__file__).resolve().parents[1]
QWEN2_7B = ModelShape.read(models.QWEN2_7B)


SMALL_CARDS = "plinth grpo preset=deepseek_r1_distill_qwen_7b_grpo"


def cards(number: int, gib: float, capability: tuple[int, int]) -> tuple[Gpu, ...]:
    return (Gpu(name="card", total_bytes=int(gib * 2**30), used_bytes=0, capability=capability),) * number


def config_of(command: str) -> GrpoConfig:
    """The configuration of `plinth grpo preset=NAME key=value ...`."""
    program, app, *arguments = shlex.split(command)
    assert (program, app) == ("plinth", "grpo")
    names = [argument.removeprefix("preset=") for argument in arguments if argument.startswith("preset=")]
    presets = [REPO / "apps" / "grpo" / "presets" / f"{name}.yaml" for name in names]
    return load_config(GrpoConfig, presets=presets, overrides=[a for a in arguments if not a.startswith("preset=")])


@pytest.mark.parametrize(
    ("recipe", "gpus"),
    [("two_11gb", cards(2, 11, (7, 5))), ("two_24gb", cards(2, 24, (8, 6))), ("eight_80gb", cards(8, 80, (9, 0)))],
)
def test_a_recipe_begins_with_a_command_that_fits(recipe: str, gpus: tuple[Gpu, ...]) -> None:
    text = (REPO / "docs" / "recipes" / f"{recipe}.md").read_text()
    match = re.match(r"# .*\n\n```\n(.*)\n```\n", text)
    assert match is not None, "the page begins with one command"
    choice = resolve_job_for(config_of(match[1]), gpus=gpus, shape=QWEN2_7B)
    assert choice.config.trainer.rank_count == len(gpus)
    assert choice.plan.gpu_bytes <= 0.97 * gpus[0].total_bytes
    assert "run out of memory" not in choice.memory


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "float16"), ((9, 0), None)])
def test_the_preset_for_small_cards_takes_turns(capability: tuple[int, int], dtype: str | None) -> None:
    choice = resolve_job_for(config_of(SMALL_CARDS), gpus=cards(2, 11, capability), shape=QWEN2_7B)
    assert "in turns" in choice.memory
    # vLLM reserves kv_cache_gib on each GPU of the server.
    assert f"KV cache {choice.config.rollout.kv_cache_gib:.1f}" in choice.memory
    assert choice.rank_bytes <= 7.5 * 2**30, "the total that docs/memory.md quotes"
    assert choice.config.actor.dtype == dtype
    larger = config_of(f"{SMALL_CARDS} trainer.take_turns=null")
    assert resolve_job_for(larger, gpus=cards(2, 24, (8, 9)), shape=QWEN2_7B).config.trainer.take_turns == "never"


def test_sft_fits_on_two_small_cards() -> None:
    preset = REPO / "apps/sft/presets/deepseek_r1_distill_qwen_7b_sft.yaml"
    config = load_config(SftConfig, presets=[preset])
    choice = resolve_supervised_for(config, gpus=cards(2, 11, (7, 5)), shape=QWEN2_7B)
    assert choice.rank_bytes <= 0.97 * 11 * 2**30
    assert "run out of memory" not in choice.memory


def test_a_server_with_a_rounded_base() -> None:
    arguments = server_arguments(config_of(SMALL_CARDS).rollout, "/model", port=1, device="cuda")
    at = arguments.index("--quantization")
    assert arguments[at : at + 4] == ["--quantization", "bitsandbytes", "--load-format", "bitsandbytes"]
    with raises(RolloutConfigError, field="quantization", value="bitsandbytes"):
        check_device_features(RolloutConfig(quantization="bitsandbytes"), "cpu")
    for override in ("rollout.max_lora_rank=null", "rollout.load_format=dummy"):  # nothing could be pushed to it
        with pytest.raises(ConfigError):
            config_of(f"{SMALL_CARDS} {override}")
