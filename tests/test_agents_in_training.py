"""Agents that ask the policy over HTTP and rewrite their conversations, in training on the real stack."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import test_staleness
from tests.run_folders import rollouts
from tests.test_rollout_in_training import REPO, SMALL, read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]


AGENT = (
    *("preset=demo", *SMALL, "trainer.total_training_steps=3", "episode.agent=rollout_vllm_agents:compacting"),
    *("sampling.max_tokens=40", "validation.max_tokens=40", "data.max_prompt_length=24"),
)


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPO / "packages" / "rollout_vllm" / "tests"), prepend=os.pathsep)


def test_an_agent_that_branches_is_trained_token_for_token_also_when_a_server_dies(
    tmp_path: Path, start_app: Callable[..., Any]
) -> None:
    app = start_app(tmp_path, *AGENT, "trainer.total_training_steps=2")
    app.wait_for("s/step")
    (server,) = [p for p in app.children("_serve.py") if "_supervise.py" not in " ".join(p.cmdline())]
    server.kill()
    app.wait_for("rollout server 0 restarted")
    run = app.succeeded()
    assert_faithful(run, steps=2)
    for row in read_metrics(run):
        assert float(row["rollout/num_samples"]) == 32
        assert float(row["rollout/num_failed"]) == 0
        assert float(row["rollout/num_turns"]) == 4
        assert float(row["rollout/num_paths"]) == 3


def test_episodes_that_are_held_in_the_middle_keep_the_versions_of_their_tokens(
    tmp_path: Path, start_app: Callable[..., Any]
) -> None:
    app = start_app(tmp_path, *AGENT, "oversampling.extra_prompts=4", "rollout.max_num_seqs=24")
    run = app.succeeded()
    assert_faithful(run, steps=3)
    rows = read_metrics(run)
    assert max(float(row["rollout/num_partial_groups"]) for row in rows) == 4
    assert max(float(row["rollout/stale_token_share"]) for row in rows) > 0
    assert all(float(row["rollout/num_samples"]) == 32 for row in rows)


def test_a_killed_run_that_draws_ahead_resumes_and_trains_every_episode_once(
    tmp_path: Path, start_app: Callable[..., Any]
) -> None:
    ahead = ("trainer.max_staleness=1", "trainer.save_freq=2", "trainer.total_training_steps=6")
    settings = (*ahead, "sync.running_requests=recompute")  # caches of older weights are not kept
    first = start_app(tmp_path, *AGENT, *test_staleness.SMALL, "rollout.max_model_len=136", *settings)
    first.wait_for("step 3/6")  # the checkpoint of step 2 exists, and has groups for steps 3 and 4
    first.kill()
    (run,) = tmp_path.iterdir()
    second = start_app(tmp_path, f"config={run / 'config.yaml'}", "trainer.resume=auto", f"trainer.resume_from={run}")
    assert second.finish() == 0, second.output
    (resumed,) = {*tmp_path.iterdir()} - {run}
    test_staleness.check_ledger(test_staleness.read_samples(resumed), steps=6, groups=4, samples=4, max_staleness=1)
    for row in read_metrics(resumed):
        assert float(row["rollout/num_paths"]) == 3
        assert float(row.get("rollout/log_prob_mismatch") or 0) < 1e-4


def assert_faithful(run: Path, *, steps: int) -> None:
    """Of every sampled token the log-prob is that of its place: elsewhere they differ by tenths."""
    rows, samples = read_metrics(run), rollouts(run)
    assert len(rows) == steps
    for row in rows:
        assert float(row["rollout/log_prob_mismatch"]) < 1e-4
        assert float(row["rollout/log_prob_mismatch_max"]) < 1e-3
    assert samples
    for sample in samples:
        assert sample["tree"].count("turn ") == 4
        assert sum(count for _, count in sample["version_spans"]) <= sample["num_response_tokens"]
