"""A mixture of experts is trained with the routes of its servers: rollout, batch, log-probs, update, push, resume."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.run_folders import metrics_rows, only
from tests.small_mixture import mixture_keys

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]


def settings(folder: Path) -> list[str]:
    float32 = ("actor.dtype=float32", "rollout.dtype=float32")
    return [*mixture_keys(folder), *float32, "batch.train_batch_size=4", "algorithm.kl_coef=0.01"]


def run(start_app: Callable[..., Any], folder: Path, *overrides: str) -> list[dict[str, str]]:
    app = start_app(folder, *overrides)
    assert app.finish() == 0, app.output
    return metrics_rows(only(path for path in folder.glob("grpo_*")))


def test_a_mixture_learns_with_the_routes_of_its_servers_and_partial_rollouts(
    tmp_path: Path, start_app: Callable[..., Any]
) -> None:
    rows = run(
        start_app,
        tmp_path,
        *settings(tmp_path),
        "actor.router_replay=R3",
        "actor.zero.stage=3",
        "actor.gradient_checkpointing=true",
        "actor.collective_guard=auto",
        "sync.verify=true",
        "oversampling.extra_prompts=2",
        "trainer.total_training_steps=3",
    )
    assert len(rows) == 3
    assert float(rows[0]["actor/routes_differ"]) < 0.01, "later steps have samples of older policy versions"
    assert all(float(row["rollout/log_prob_mismatch"]) < 1e-4 for row in rows), "fresh weights, the same routes"


def test_groups_drawn_ahead_bring_their_routes_into_a_resumed_run(
    tmp_path: Path, start_app: Callable[..., Any]
) -> None:
    common = [
        *settings(tmp_path),
        f"data.val=[{tmp_path / 'train.jsonl'}]",
        "trainer.test_freq=1",
        "trainer.save_freq=1",
        "trainer.max_staleness=1",
        "rollout.max_samples_in_flight=4",  # so that groups are in flight at every push
        "actor.router_replay=R3",
        "trainer.total_training_steps=4",
    ]
    first = start_app(tmp_path / "first", *common)
    first.wait_for("step 2/4")
    first.stop()
    old = only((tmp_path / "first").glob("grpo_*"))
    rows = run(start_app, tmp_path / "second", *common, "trainer.resume=auto", f"trainer.resume_from={old}")
    assert rows[-1]["step"] == "4"
    assert all(float(row["actor/routes_differ"]) < 0.5 for row in rows)
    assert any(row["rollout/log_prob_mismatch_stale"] for row in rows)
    assert all(row["val/accuracy"] for row in rows)
