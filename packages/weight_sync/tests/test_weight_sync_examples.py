"""The examples run unchanged against the shared server, which then serves the weights that they trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
import weight_sync_helpers as helpers
from weight_sync_helpers import Server, assert_serves

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_plain_module_and_fsdp2(server: Server, old_model: Any, tmp_path: Path) -> None:
    folder = str(helpers.save_model(old_model, tmp_path / "model"))
    tail = [folder, server.url, "--api-key", str(server.api_key), "--save"]
    saved = tmp_path / "plain"
    text = helpers.run_processes([[str(EXAMPLES / "push_plain_model.py"), *tail, str(saved)]], tmp_path, 400)
    assert "version 2: " in text
    import transformers

    trained = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    assert not torch.equal(trained.model.norm.weight, old_model.model.norm.weight)
    assert assert_serves(server, trained) <= 1e-4
    saved = tmp_path / "weights.pt"
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(helpers.free_port())]
    text = helpers.run_processes([[*torchrun, str(EXAMPLES / "push_fsdp2.py"), *tail, str(saved)]], tmp_path, 400)
    assert "version 1: " in text
    trained = helpers.tiny_model(helpers.tiny_config(), seed=1)
    trained.load_state_dict(torch.load(saved), strict=False)
    assert not torch.equal(trained.model.norm.weight, old_model.model.norm.weight)
    assert assert_serves(server, trained) <= 1e-4
