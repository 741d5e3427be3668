"""SFT's presets load, alone and with the overlay for two CPU cores, and have the values that they document."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import apps.sft.main as sft
import rl_runtime
from apps.sft.config import SftConfig
from run_kit import load_config

FOLDER = Path(__file__).resolve().parents[1] / "apps" / "sft" / "presets"
PRESETS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
TINY = FOLDER / "overlays" / "tiny.yaml"
DOCUMENTED: dict[str, dict[str, Any]] = {
    "demo": {"model.path": "builtin:tiny", "supervised.steps": 300, "supervised.optim.lr": 2e-3},
    "small": {"engine.zero.stage": 2, "engine.lora": None, "supervised.optim.lr": None},
    "full_7b": {"engine.zero.stage": 3, "trainer.num_ranks": 8, "engine.gradient_checkpointing": True},
    "lora_7b": {"engine.lora.rank": 16, "engine.lora.base_format": "plain", "supervised.optim.lr": None},
    "deepseek_r1_distill_qwen_7b_sft": {
        "model.path": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
        "engine.zero.stage": 2,
        "engine.zero.offload.optimizer": "cpu",
        "engine.lora.base_format": "nf4",
        "supervised.batch_size": 32,
        "micro_batch_size": 1,
        "trainer.num_ranks": 2,
    },
    "qlora_7b": {"engine.lora.rank": 16, "engine.lora.base_format": "nf4"},
}


def value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_the_values_that_they_document(preset: str) -> None:
    config = load_config(SftConfig, presets=[FOLDER / f"{preset}.yaml"])
    assert {key: value(config, key) for key in DOCUMENTED[preset]} == DOCUMENTED[preset]


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_pass_the_checks_with_the_overlay_for_cpus(preset: str, tmp_path: Path) -> None:
    overrides = [f"trainer.output_dir={tmp_path}"]
    config = load_config(SftConfig, presets=[FOLDER / f"{preset}.yaml", TINY], overrides=overrides)
    choice = rl_runtime.resolve_supervised(config)
    assert choice.config.supervised.optim.lr == 2e-3
    assert sft.check(choice.config).placement.num_ranks == 2


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "demo"])
def test_presets_train_on_cpus(preset: str, tmp_path: Path, start_app: Callable[..., Any]) -> None:
    app = start_app(tmp_path, f"preset={preset}", "overlay=tiny", app="sft")
    assert app.finish() == 0, app.output
    before, after = app.output.split("held-out loss      ")[1].split(" after")[0].split(" before, ")
    assert float(after) < float(before), app.output
    (run,) = tmp_path.iterdir()
    assert (run / "model" / "model.safetensors").is_file()
    assert [path.name for path in (run / "rollouts").iterdir()]
