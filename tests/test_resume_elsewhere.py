"""A run saved by two ranks at ZeRO-2 resumes on one rank at ZeRO-3; with the whole model and with adapters."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.run_folders import metrics_rows

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

CASES = {"whole": [], "lora": ["actor.lora.rank=4", "actor.lora.alpha=8"]}
ARGUMENTS = [
    "rollout.deterministic=true",
    "batch.train_batch_size=8",
    "batch.mini_batch_size=4",
    "sampling.n=4",
    "reward.method=flexible",
    "reward.format_score=0.5",
    "algorithm.entropy_coef=0.05",  # a gradient even where all answers are equally wrong
    "warm_start.steps=20",
    "trainer.total_training_steps=3",
    "trainer.val_before_train=false",
    "trainer.val_after_train=false",
    "trainer.save_freq=2",
]


def only_run(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def metrics_of(run: Path, step: int) -> dict[str, str]:
    (row,) = (row for row in metrics_rows(run) if row["step"] == str(step))
    return row


def samples_of(run: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_at_stage_2_then_one_at_stage_3(case: str, tmp_path: Path, start_app: Callable[..., Any]) -> None:
    """Both take the third step, from the checkpoint of the second: same samples, same update."""
    arguments = [*ARGUMENTS, *CASES[case]]
    app = start_app(tmp_path / "two", *arguments, "trainer.num_ranks=2", "actor.zero.stage=2")
    assert app.finish() == 0, app.output
    two = only_run(tmp_path / "two")

    moved = [*arguments, "trainer.num_ranks=1", "actor.zero.stage=3", "trainer.resume=auto"]
    app = start_app(tmp_path / "one", *moved, f"trainer.resume_from={two}")
    assert app.finish() == 0, app.output
    assert "resumed after step 2" in app.output
    assert "saved with trainer.num_ranks=2" in app.output
    one = only_run(tmp_path / "one")
    assert samples_of(one, 3) == samples_of(two, 3), "the servers hold the same weights, bit for bit"
    expected, actual = metrics_of(two, 3), metrics_of(one, 3)
    assert float(expected["actor/grad_norm"]) > 0
    for name in ("actor/grad_norm", "actor/loss", "actor/entropy"):  # sums in another order
        assert float(actual[name]) == pytest.approx(float(expected[name]), rel=1e-3, abs=1e-6), name
    assert actual["actor/lr"] == expected["actor/lr"]

    if case == "lora":  # other adapters than were saved are refused
        app = start_app(tmp_path / "other", *moved, f"trainer.resume_from={two}", "actor.lora.rank=8")
        assert app.finish() == 2, app.output
        assert "error: actor.lora.rank: got 8" in app.output
        assert "run folder" not in app.output
        assert not app.survivors()
