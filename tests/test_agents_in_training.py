"""Agents that ask the policy over HTTP and rewrite their conversations, in training on the real stack."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.test_rollout_in_training import REPO, SMALL, read_metrics, read_samples

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def test_an_agent_that_branches_is_trained_token_for_token_also_when_a_server_dies(
    tmp_path: Path, start_app: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPO / "packages" / "rollout_vllm" / "tests"), prepend=os.pathsep)
    app = start_app(
        tmp_path,
        "preset=demo",
        "trainer.total_training_steps=3",
        *SMALL,
        "episode.agent=rollout_vllm_agents:compacting",
        "sampling.max_tokens=40",
        "data.max_prompt_length=24",
    )
    app.wait_for("s/step")
    (server,) = [p for p in app.children("_serve.py") if "_supervise.py" not in " ".join(p.cmdline())]
    server.kill()
    app.wait_for("rollout server 0 restarted")
    assert app.finish() == 0, app.output
    assert not app.survivors()
    (run,) = tmp_path.iterdir()
    rows = read_metrics(run)
    assert len(rows) == 3
    for row in rows:
        assert float(row["rollout/num_samples"]) == 32
        assert float(row["rollout/num_failed"]) == 0
        assert float(row["rollout/num_turns"]) == 4
        assert float(row["rollout/num_paths"]) == 3
        # Of every sampled token in the place where the policy sampled it: elsewhere they differ by tenths.
        assert float(row["rollout/log_prob_mismatch"]) < 1e-4
        assert float(row["rollout/log_prob_mismatch_max"]) < 1e-3
    for sample in read_samples(run):
        assert sample["tree"].count("turn ") == 4
