"""Weights & Biases, MLflow and trackio: the rule of `SentOnce`, and the real libraries where they are installed."""

import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_kit_testkit import QUIET

from plinth_testing import raises
from run_kit import RunFolder, Tracker, TrackingConfig, check_tracking
from run_kit.errors import TrackingError
from run_kit.signals import RunStopped
from run_kit.tracking.services import SentOnce, _last_step


@dataclass(frozen=True, kw_only=True)
class AppConfig:
    url: str = "http://user:password@host"
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


class Recorder:
    """A service that is this process's memory."""

    run_id = "r"

    def __init__(self) -> None:
        self.sent: list[int] = []

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        if "broken" in metrics:
            raise ConnectionError("http://user:password@host does not answer")
        self.sent.append(step)

    def close(self, *, failed: bool) -> None:
        raise TimeoutError


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), max_size=6))
def test_whatever_is_repeated_no_step_is_sent_twice(restarts: list[tuple[int, int]]) -> None:
    """Each restart takes some more steps and then goes back by some."""
    service, last = Recorder(), 0
    once = SentOnce("wandb", service)
    furthest = 0
    once.write(0, {"val/accuracy": 0.5})  # before the first step
    for steps, back in restarts:
        for step in range(last + 1, last + steps + 1):
            once.write(step, {"a": 1.0})
        furthest = max(furthest, last + steps)
        taken, last = last + steps, max(0, last + steps - back)
        line = once.rewind(last, last_step=taken)
        assert bool(line) == (furthest > last)
    assert service.sent == list(range(furthest + 1))


def test_a_service_that_fails_does_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    once = SentOnce("mlflow", Recorder())
    once.write(3, {"broken": 1})
    once.close()
    printed = capsys.readouterr().err
    assert "warning: mlflow did not take step 3: http://***@host does not answer" in printed
    assert "warning: mlflow did not finish its run" in printed


SWITCHED_ON = {
    "wandb": TrackingConfig(wandb_project="p"),
    "mlflow": TrackingConfig(mlflow_experiment="p"),
    "trackio": TrackingConfig(trackio_project="p"),
}


@pytest.mark.parametrize("package", SWITCHED_ON)
def test_a_missing_package_is_reported_before_the_run(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with raises(TrackingError, value="p", remedy=f"pip install {package}, or leave the key unset"):
        check_tracking(SWITCHED_ON[package])
    with raises(TrackingError, value="p"):
        Tracker(RunFolder.create(tmp_path, "x"), SWITCHED_ON[package], num_steps=1)


def test_steps_of_a_run_that_died_before_it_saved_a_checkpoint_are_known(tmp_path: Path) -> None:
    """Run a saved step 2 and died at 4; b resumed from it and died at 6; c resumes from a as well."""
    steps = {"a": (1, 2, 3, 4), "b": (3, 4, 5, 6), "other": (1, 9)}
    for name, taken in steps.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "services.json").write_text(json.dumps({"mlflow": "other" if name == "other" else "r"}))
        (tmp_path / name / "metrics.tsv").write_text("step\ta\n" + "".join(f"{step}\t1\n" for step in taken))
    (tmp_path / "file").write_text("")
    assert _last_step(tmp_path / "a", {"mlflow": "r"}) == 6
    assert _last_step(tmp_path / "other", {"mlflow": "other"}) == 9


# --- the real libraries: CI runs these with the releases that .ci/run names, and fails where they are skipped ---------


def train_twice(tmp_path: Path, tracking: TrackingConfig) -> tuple[RunFolder, RunFolder]:
    """A run with a warm start of five steps that is killed after step 4; it is resumed after step 2 up to step 6."""
    config = AppConfig(tracking=tracking)
    first = RunFolder.create(tmp_path / "outputs", "first")
    tracker = Tracker(first, config, num_steps=6)
    for step in range(1, 6):
        tracker.log_supervised(step, {"loss": 0.5})
    tracker.log_validation(0, {"val/pass@4": 0.25})
    for step in range(1, 5):
        tracker.log(step, {"critic/score/mean": step / 10, "actor/loss": float("nan")})
    tracker.close(failed=True)
    second = RunFolder.create(tmp_path / "outputs", "second")
    with Tracker(second, config, num_steps=6, resumes=first.path) as tracker:
        for step in range(3, 7):
            tracker.log(step, {"critic/score/mean": step / 5})
    return first, second


SCORES = [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 1.0), (6, 1.2)]
"""Steps 3 and 4 stay as they were sent first."""


def test_mlflow_continues_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow")
    pytest.importorskip("alembic", reason="pip install mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    first, second = train_twice(tmp_path, replace(QUIET, mlflow_experiment="plinth", mlflow_uri=uri))
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("plinth").experiment_id])
    assert (run.info.run_name, run.info.status) == (first.name, "FINISHED")
    sent = client.get_metric_history(run.info.run_id, "critic/score/mean")
    assert [(one.step, pytest.approx(one.value)) for one in sent] == SCORES
    assert [one.step for one in client.get_metric_history(run.info.run_id, "sft/loss")] == [1, 2, 3, 4, 5]
    assert run.data.metrics["val/pass_4"] == 0.25
    assert run.data.params["url"] == "http://***@host"
    assert run.data.params["tracking.mlflow_experiment"] == "plinth"
    assert f"continues run {run.info.run_id}, which has the steps up to 4" in capsys.readouterr().out
    assert json.loads((second.path / "services.json").read_text()) == {"mlflow": run.info.run_id}


def test_mlflow_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="pip install mlflow")
    config = replace(QUIET, mlflow_experiment="plinth", mlflow_uri="nosuch://user:password@host/db")
    with raises(TrackingError, field="tracking.mlflow_experiment", value="plinth") as e:
        Tracker(RunFolder.create(tmp_path, "x"), config, num_steps=1)
    assert "password" not in str(e.value)


def test_trackio_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio", reason="pip install trackio")
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")
    first, _ = train_twice(tmp_path, replace(QUIET, trackio_project="plinth"))
    assert sqlite_storage.SQLiteStorage.get_runs("plinth") == [first.name]
    rows = sqlite_storage.SQLiteStorage.get_logs("plinth", first.name)
    key = "critic/score/mean"
    assert [(row["step"], pytest.approx(row[key])) for row in rows if key in row] == SCORES
    assert [row["step"] for row in rows if "sft/loss" in row] == [1, 2, 3, 4, 5]


def test_wandb_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    first, second = train_twice(tmp_path, replace(QUIET, wandb_project="p"))
    wandb.teardown()  # its process may still write the file when `finish` has returned; this waits until it has ended
    ids = [json.loads((run.path / "services.json").read_text())["wandb"] for run in (first, second)]
    assert ids[0] == ids[1]
    assert ids[0]


def test_a_run_that_a_signal_stopped_is_not_a_failed_one(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Writer(SentOnce):
        def close(self, *, failed: bool = False) -> None:
            seen.append(failed)

    def run(error: BaseException) -> None:
        with Tracker(RunFolder.create(tmp_path, "x"), QUIET, num_steps=1) as tracker:
            tracker._writers.append(Writer("wandb", Recorder()))
            raise error

    for error in (RunStopped(signal.SIGTERM), ValueError("broken")):
        with pytest.raises(type(error)):
            run(error)
    assert seen == [False, True]
