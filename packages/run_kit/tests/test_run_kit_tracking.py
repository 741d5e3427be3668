"""The lines of a run in the terminal, and what the tracker leaves in its folder."""

import json
import math
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from run_kit_testkit import QUIET, Clock, read_events

from plinth_testing import raises
from run_kit import (
    MetricsTable,
    Progress,
    RunFolder,
    Tracker,
    TrackingConfig,
    read_rollouts,
)
from run_kit.config.loader import load_config
from run_kit.errors import ConfigError
from run_kit.tracking.progress import SCORE, duration_text


@dataclass(frozen=True, kw_only=True)
class AppConfig:
    seed: int = 1
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def test_progress_lines(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(30)
    clock.now += 4 + 110
    progress.step(1, {SCORE: 0.5, "perf/throughput": 1234.4, "timing_s/step": 3.9, "actor/loss": 1.0})
    clock.now += 6
    progress.step(2, {"sft/loss": 0.0123456, "sft/lr": 1.0})
    clock.now += 4
    progress.step(30, {SCORE: 1.0})
    assert capsys.readouterr().out == (
        "step  1/30  score  0.500    1,234 tok/s    3.9 s/step   1m53s left\n"
        "step  2/30    6.0 s/step  loss 0.0123   2m19s left\n"
        "step 30/30  score  1.000    4.0 s/step    done\n"
    )


def test_a_resumed_run_estimates_from_its_own_steps(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(100)
    clock.now += 2
    progress.step(91, {})
    assert capsys.readouterr().out.endswith("   18s left\n")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (59.4, "59s"), (65, "1m05s"), (12000, "3h20m"), (187200, "2d04h"), (math.nan, "?")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_a_run_leaves_everything(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with Tracker(run, AppConfig(seed=3), num_steps=6) as tracker:
        for step in range(1, 4):
            tracker.log_supervised(step, {"loss": 0.5, "grad_norm": 1.0, "lr": 1e-3})
        tracker.log_validation(0, {"val/accuracy": 0.25})
        rest = {"perf/throughput": 100.0, "timing_s/step": 2.0, "timing_s/gen": 1.5, "memory/host_peak_gib": 3.0}
        for step in range(1, 7):
            tracker.log(step, {"critic/score/mean": step / 10, **rest})
            tracker.log_rollouts(step, [{"prompt": "p", "response": "<b>r</b>", "reward": 1.0}] * 20)
        tracker.log_validation(6, {"val/accuracy": 0.75})
        facts = tracker.summary(before=0.25, after=0.75)
    names = "config.yaml curves.png metrics.tsv report.html rollouts run.json summary.json supervised.tsv tensorboard"
    assert sorted(path.name for path in run.path.iterdir()) == [*names.split(), "train.log"]
    table = MetricsTable(run.metrics_file)
    assert table.steps == tuple(range(7))
    assert table.row(6)["val/accuracy"] == 0.75
    assert len(read_rollouts(run.rollouts_dir)) == 6 * 8
    events = read_events(run.tensorboard_dir)
    assert (1, "sft/loss", 0.5) in events
    assert (6, "val/accuracy", 0.75) in events
    assert len([e for e in events if e[1] == "critic/score/mean"]) == 6
    assert json.loads(run.summary_file.read_text()) == facts
    assert facts["accuracy_after"] == 0.75
    assert facts["score_last_5"] == pytest.approx(0.4)
    log = run.log_file.read_text()
    assert log == capsys.readouterr().out
    assert "held-out accuracy  0.250 before, 0.750 after (+0.500)" in log
    assert "step 6/6  score  0.600" in log
    assert "at most 3.0 GiB" in log


def test_a_run_may_count_its_steps_once_its_data_is_loaded(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with Tracker(run, TrackingConfig(tensorboard=False, report=False), num_steps=0) as tracker:
        tracker.expect(2)
        tracker.log(1, {"sft/loss": 0.5})
        assert json.loads(run.state_file.read_text())["num_steps"] == 2
        tracker.log(2, {"sft/loss": 0.25})
        tracker.summary()
    assert "step 2/2" in capsys.readouterr().out
    assert json.loads(run.state_file.read_text())["num_steps"] == 2
    assert not run.supervised_file.exists()
    assert not run.tensorboard_dir.exists()


def test_the_row_of_a_validation_is_no_step(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with Tracker(run, QUIET, num_steps=8) as tracker:  # resumed after step 4
        tracker.log_validation(4, {"val/accuracy": 0.25})
        for step in (5, 6, 7):
            tracker.log(step, {"critic/score/mean": 0.5})
        tracker.rewind(5, {})  # ranks were lost, and steps 6 and 7 are taken again
        for step in (6, 7, 8):
            tracker.log(step, {"critic/score/mean": 0.5})
        tracker.log_validation(8, {"val/accuracy": 0.5})
        assert tracker.summary()["num_steps"] == 4
    assert "4 steps in " in capsys.readouterr().out


@pytest.mark.parametrize(("field", "value"), [("rollouts_per_step", -1), ("mlflow_uri", "http://host:5000")])
def test_tracking_config_checks(field: str, value: object) -> None:
    with raises(ConfigError, field=field, value=value):
        load_config(TrackingConfig, overrides=[f"{field}={value}"])


def test_tracking_a_run_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom run_kit import RunFolder, Tracker, TrackingConfig\n"
        f"with Tracker(RunFolder.create({str(tmp_path)!r}, 'x'), TrackingConfig(), num_steps=1) as t:\n"
        "    t.log(1, {'a': 1})\n"
        "print(sorted({'torch', 'tensorflow', 'ray', 'matplotlib.pyplot'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_an_error_is_not_hidden_by_a_failure_to_close_the_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ImportError("partially initialized module")

    monkeypatch.setattr("run_kit.tracking.curves.write_curves", broken)

    def run(error: BaseException | None) -> None:
        with Tracker(RunFolder.create(tmp_path, "run"), TrackingConfig(tensorboard=False), num_steps=2) as tracker:
            tracker.log(1, {"critic/score/mean": 0.5})
            if error is not None:
                raise error

    with pytest.raises(KeyboardInterrupt) as interrupted:
        run(KeyboardInterrupt())
    assert "partially initialized" in interrupted.value.__notes__[0]
    with pytest.raises(ImportError):
        run(None)


def test_a_run_that_goes_on_from_an_earlier_step_is_recorded_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = RunFolder.create(tmp_path, "run")
    with Tracker(run, TrackingConfig(report=False, curves=False), num_steps=4) as tracker:
        for step, score in ((1, 0.1), (2, 0.2), (3, 0.3)):
            tracker.log(step, {"critic/score/mean": score})
        tracker.rewind(1, {"critic/score/mean": 0.7})  # step 1 was logged
        for step, score in ((2, 0.25), (3, 0.35)):
            tracker.log(step, {"critic/score/mean": score})
        tracker.rewind(4, {"critic/score/mean": 0.45})  # step 4 was saved, but not logged
        tracker.log(5, {"critic/score/mean": 0.55})
    expected = [(1, 0.1), (2, 0.25), (3, 0.35), (4, 0.45), (5, 0.55)]
    table = MetricsTable(run.metrics_file)
    assert [(step, table.row(step)["critic/score/mean"]) for step in table.steps] == expected
    events = EventAccumulator(str(run.tensorboard_dir))
    events.Reload()
    shown = [(event.step, pytest.approx(event.value)) for event in events.Scalars("critic/score/mean")]
    assert expected == shown
