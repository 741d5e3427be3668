"""A small mixture of experts learns the built-in task, from random weights to an exported model, on the CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_data import build_tiny_model, write_task
from tests.run_folders import metrics_rows, only

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.thorough]
LAST_EXPERT = "model.layers.1.mlp.experts.7.down_proj.weight"
DEMO = Path(__file__).resolve().parents[1] / "apps" / "presets" / "demo.yaml"


def write_mixture(folder: Path) -> Path:
    """The built-in model with eight experts of half its MLP's width in each layer, two for each token."""
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

    dense = AutoConfig.from_pretrained(build_tiny_model(folder)).to_dict()
    own = {key: value for key, value in dense.items() if key not in ("model_type", "architectures", "layer_types")}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**own, **experts)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_a_mixture_learns_is_served_and_exported(tmp_path: Path, start_app: Callable[..., Any]) -> None:
    """Each push is compared with the server's weights, bit for bit; ZeRO-3 on two ranks, each with its own routing."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = write_mixture(tmp_path / "mixture")
    task = write_task(tmp_path / "task", num_demonstrations=19200, num_val=128)
    app = start_app(
        tmp_path / "runs",
        f"config={DEMO}",
        f"model.path={model}",
        f"data.train={task.train}",
        f"data.val={task.val}",
        f"warm_start.files={task.demonstrations}",
        "actor.zero.stage=3",
        "actor.zero.param_persistence_elements=0",
        "actor.collective_guard=auto",
        "sync.verify=true",
        "trainer.num_ranks=2",
        "trainer.total_training_steps=12",
        "trainer.test_freq=12",
        app="grpo",
    )
    assert app.finish() == 0, app.output
    run = only((tmp_path / "runs").iterdir())
    rows = metrics_rows(run)
    before, after = (float(row["val/accuracy"]) for row in rows if row["val/accuracy"])
    assert before + 0.15 < after > 0.5
    assert all(float(row["sync/num_bytes"]) > 3e6 for row in rows if row["sync/num_bytes"])
    exported = load_file(only((run / "model").glob("*.safetensors")))
    given = load_file(only(model.glob("*.safetensors")))
    assert {name: tensor.shape for name, tensor in exported.items()} == {n: t.shape for n, t in given.items()}
    assert not any(torch.equal(exported[name], given[name]) for name in given if ".experts." in name)
    loaded = AutoModelForCausalLM.from_pretrained(run / "model").state_dict()
    assert torch.equal(loaded["model.layers.1.mlp.experts.down_proj"][7], exported[LAST_EXPERT])
