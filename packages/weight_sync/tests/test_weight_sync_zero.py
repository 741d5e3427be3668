"""Two real DeepSpeed ranks over gloo: ZeroSource sends the exact weights of every stage, and stage 3 pushes them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import weight_sync_helpers as helpers
from weight_sync_helpers import Server, assert_serves

from plinth_testing import run_script

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_two_ranks_of_every_stage(server: Server, old_model: Any, tmp_path: Path) -> None:
    helpers.save_model(old_model, tmp_path / "model")
    out = tmp_path / "weights.pt"
    arguments = ["--folder", tmp_path / "model", "--url", server.url, "--api-key", server.api_key, "--out", out]
    run_script(Path(__file__).with_name("weight_sync_zero_worker.py"), *arguments, timeout_s=180)
    trained = helpers.tiny_model(seed=1)
    trained.load_state_dict(torch.load(out), strict=False)
    assert not torch.equal(trained.model.norm.weight, old_model.model.norm.weight)
    assert assert_serves(server, trained) <= 1e-4
