"""The examples run unchanged against the shared server, which then serves the weights that they trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
import weight_sync_helpers as helpers
from weight_sync_helpers import Server, assert_serves

from plinth_testing import launch_ranks, run_script

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_plain_module_and_fsdp2(server: Server, old_model: Any, tmp_path: Path) -> None:
    folder = str(helpers.save_model(old_model, tmp_path / "model"))
    tail = [folder, server.url, "--api-key", str(server.api_key), "--save"]
    saved = tmp_path / "plain"
    text = run_script(EXAMPLES / "push_plain_model.py", *tail, saved)
    assert "version 2: " in text
    import transformers

    trained = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    assert not torch.equal(trained.model.norm.weight, old_model.model.norm.weight)
    assert assert_serves(server, trained) <= 1e-4
    saved = tmp_path / "weights.pt"
    text = launch_ranks(EXAMPLES / "push_fsdp2.py", *tail, saved, timeout_s=400)[0].output
    assert "version 1: " in text
    trained = helpers.tiny_model(seed=1)
    trained.load_state_dict(torch.load(saved), strict=False)
    assert not torch.equal(trained.model.norm.weight, old_model.model.norm.weight)
    assert assert_serves(server, trained) <= 1e-4
