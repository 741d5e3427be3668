"""The SFT app on real DeepSpeed ranks."""

import csv
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from run_kit.runs import list_runs

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def test_the_loss_falls_and_the_model_loads(tmp_path: Path, start_app: Callable[..., Any]) -> None:
    app = start_app(
        tmp_path,
        "engine.dtype=float32",
        "supervised.steps=40",
        "supervised.batch_size=32",
        "engine.zero.stage=1",
        app="sft",
    )
    assert app.finish() == 0, app.output
    assert not app.survivors()
    (run,) = tmp_path.iterdir()
    with (run / "metrics.tsv").open() as file:
        losses = [float(row["sft/loss"]) for row in csv.DictReader(file, delimiter="\t")]
    assert len(losses) == 40
    # 64 words: a model that knows nothing starts near ln 64 = 4.2.
    assert losses[0] > 3
    assert losses[-1] < 2

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(run / "model"), AutoTokenizer.from_pretrained(run / "model")
    assert model.num_parameters() > 0.3e6
    assert tokenizer.decode(tokenizer("3 + 1 = 4")["input_ids"]) == "3 + 1 = 4"


def test_a_run_that_diverges_exports_nothing_and_fails(tmp_path: Path, start_app: Callable[..., Any]) -> None:
    app = start_app(
        tmp_path,
        "trainer.num_ranks=1",
        "engine.dtype=float32",
        "task.num_demonstrations=64",
        "supervised.steps=30",
        "supervised.batch_size=8",
        "supervised.optim.lr=1e9",
        "supervised.optim.schedule=constant",
        "supervised.optim.warmup_steps=0",
        "trainer.max_skipped_updates=3",
        app="sft",
    )
    assert app.finish() == 1, app.output
    assert app.output.count("warning: skipped an update of the actor") == 1
    assert "error: the actor has diverged: the gradients of its last 3 updates are not finite" in app.output
    assert "Traceback" not in app.output
    (run,) = tmp_path.iterdir()
    assert not (run / "model").exists()
    assert "Traceback" in (run / "train.log").read_text()
    assert len((run / "metrics.tsv").read_text().splitlines()) < 10


@pytest.mark.thorough
def test_ctrl_c_finishes_the_step_and_writes_the_model_and_twice_it_does_not(
    tmp_path: Path, start_app: Callable[..., Any]
) -> None:
    for name, times in (("once", 1), ("twice", 2)):
        app = start_app(tmp_path / name, "engine.dtype=float32", "supervised.steps=100000", app="sft")
        app.wait_for("step      2/100000")
        for _ in range(times):
            app.press_ctrl_c()
            time.sleep(0.01)
        assert app.finish() == 130, app.output
        assert not app.survivors()
        (found,) = list_runs(tmp_path / name)
        assert (found.state, found.detail) == ("stopped", "by SIGINT")
        assert (tmp_path / name / found.name / "model").exists() == (times == 1)
        assert (f"stopped by SIGINT after step {found.step} of 100000" in app.output) == (times == 1)


@pytest.mark.thorough
def test_a_rank_that_stops_is_named_long_before_the_steps_timeout(
    tmp_path: Path, start_app: Callable[..., Any]
) -> None:
    app = start_app(
        tmp_path,
        "engine.dtype=float32",
        "task.num_demonstrations=64",
        "supervised.steps=100000",
        "supervised.batch_size=8",
        "trainer.stall_timeout_s=15",
        app="sft",
    )
    app.wait_for(" 2/100000")
    stopped = app.children("ray::TrainerWorker")[1]
    stopped.suspend()
    app.wait_for("warning: 'train' makes no progress: rank")
    assert app.finish() == 1, app.output
    rank = re.search(
        rf"error: 'train' makes no progress on any rank \(trainer.stall_timeout_s=15\): rank [01] at .*"
        rf"no heartbeat for \d+ s \({re.escape(socket.gethostname())}, pid {stopped.pid}\)\n",
        app.output,
    )
    assert rank is not None, app.output
    assert "; rank" not in rank.group(), "the other rank waits for it"
    assert not app.survivors(grace_s=10)
