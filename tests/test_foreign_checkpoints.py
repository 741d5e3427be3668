"""Checkpoints of plain DeepSpeed load into our engine, and ours into plain DeepSpeed, bit for bit in fp32."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import plinth_testing
from rl_data import build_tiny_model
from tests.run_folders import metrics_rows, only

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("foreign_checkpoints.py")


@pytest.mark.parametrize(
    "cases", [pytest.param("some", marks=pytest.mark.long), pytest.param("all", marks=pytest.mark.thorough)]
)
def test_zero_and_universal_checkpoints_in_both_directions(cases: str, tmp_path: Path) -> None:
    assert "all loaded" in plinth_testing.run_script(SCRIPT, tmp_path, cases, timeout_s=900)


@pytest.mark.e2e
@pytest.mark.thorough
def test_an_app_takes_the_config_and_the_checkpoint_of_plain_deepspeed(
    tmp_path: Path, start_app: Callable[..., Any]
) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    model = build_tiny_model(tmp_path / "model")
    plinth_testing.run_script(SCRIPT, tmp_path, "theirs", timeout_s=300)
    (tmp_path / "rows.jsonl").write_text(8 * '{"question": "1 + 1", "answer": "2"}\n')
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-12}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1e6},
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "train_batch_size": 4,
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    app = start_app(
        tmp_path / "runs",
        *(f"model.path={model}", f"supervised.files=[{tmp_path / 'rows.jsonl'}]", "supervised.num_samples=0"),
        *("supervised.steps=1", "supervised.optim.warmup_steps=0", "trainer.num_ranks=2", "trainer.device=cpu"),
        f"engine.deepspeed={tmp_path / 'ds.json'}",
        f"trainer.states_from.actor={tmp_path / 'theirs'}",
        app="sft",
    )
    run = app.succeeded()
    assert len(metrics_rows(run)) == 1
    written = (run / "config.yaml").read_text()
    assert f"engine.dtype=float32: bf16.enabled of {tmp_path / 'ds.json'}" in written
    assert f"supervised.batch_size=4: train_batch_size of {tmp_path / 'ds.json'}" in written
    theirs = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "theirs"))
    first, exported = (
        safetensors.torch.load_file(only(folder.glob("*.safetensors"))) for folder in (model, run / "model")
    )
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-9)
    assert any(float((exported[name] - first[name].float()).abs().max()) > 1e-3 for name in first)
