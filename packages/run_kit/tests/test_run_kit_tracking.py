import errno
import json
import logging
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_kit_testkit import Clock

from plinth_testing import raises
from run_kit import (
    MetricsTable,
    Progress,
    RunFolder,
    Tracker,
    TrackingConfig,
    first_mean,
    read_rollouts,
    runs_of_experiment,
    summarize,
    tail_mean,
    write_curves,
    write_rollouts,
)
from run_kit.config.loader import load_config
from run_kit.errors import ConfigError, RunFolderError, TrackingError
from run_kit.tracking.progress import duration_text
from run_kit.tracking.rollouts import choose_sample
from run_kit.tracking.run_folder import visible_line
from run_kit.tracking.writers import TensorBoardWriter


@dataclass(frozen=True, kw_only=True)
class AppConfig:
    seed: int = 1
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


@dataclass(frozen=True, kw_only=True)
class Stats:
    loss: float = 0.5
    grad_norm: float = 1.0
    lr: float = 1e-3


@dataclass(frozen=True, kw_only=True)
class Result:
    accuracy_before: float | None = 0.25
    accuracy_after: float | None = 0.75


QUIET = TrackingConfig(tensorboard=False, report=False, curves=False)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "x")


@pytest.fixture
def table(tmp_path: Path) -> MetricsTable:
    return MetricsTable(tmp_path / "m.tsv")


# --- the run folder ---------------------------------------------------------------------------------------------------


def test_run_folders_of_the_same_second_differ(tmp_path: Path) -> None:
    names = [RunFolder.create(tmp_path / "outputs", "grpo", now=lambda: 1767323045.9).name for _ in range(3)]
    assert names == ["grpo_20260102_030405", "grpo_20260102_030406", "grpo_20260102_030407"]


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def move(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield move
    monkeypatch.undo()
    time.tzset()


def test_runs_are_ordered_by_utc_whatever_zone_each_was_in(tmp_path: Path, zone: Callable[[str], None]) -> None:
    names = []
    for hour, place in enumerate(("Asia/Tokyo", "America/New_York", "UTC")):
        zone(place)
        run = RunFolder.create(tmp_path, "x", now=lambda hour=hour: 1767323045.0 + 600 * hour)
        names.append(run.name)
    assert names == ["x_20260102_030405", "x_20260102_031405", "x_20260102_032405"]
    for name in ("x_y_20260102_120000", "xx_20260102_120000", "x_99999999_999999", "x"):
        (tmp_path / name).mkdir()
    further = ["x_20260102_130000", "y_20260102_140000"]
    assert runs_of_experiment("x", tmp_path, further) == [further[0], *names[::-1], "x_99999999_999999"]
    assert runs_of_experiment("x", tmp_path / "none") == []


def test_a_run_is_newer_than_all_before_it_also_if_the_clock_was_set_back(tmp_path: Path) -> None:
    later = time.time() + 7200
    first = RunFolder.create(tmp_path, "x", now=lambda: later)
    second = RunFolder.create(tmp_path, "x")
    for run in (first, second):
        with Tracker(run, QUIET, num_steps=1):
            pass
    third = RunFolder.create(tmp_path, "x")
    assert runs_of_experiment("x", tmp_path) == [third.name, second.name, first.name]


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "-x"])
def test_invalid_experiment_names(tmp_path: Path, name: str) -> None:
    with raises(TrackingError, field="experiment", value=name):
        RunFolder.create(tmp_path, name)


def test_folders_that_cannot_be_made_or_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises(TrackingError, field="output_dir", value=str(tmp_path / "file")):
        RunFolder.create(tmp_path / "file", "grpo")
    assert RunFolder.open(tmp_path).path == tmp_path.resolve()
    with raises(TrackingError, field="run", value=str(tmp_path / "none")):
        RunFolder.open(tmp_path / "none")


def test_written_config_repeats_the_run(run: RunFolder) -> None:
    config = AppConfig(seed=7)
    assert load_config(AppConfig, presets=[run.write_config(config)]) == config
    file = run.write_config(config, "chosen:\nkey=1: {why")
    assert file.read_text().startswith("# chosen:\n# key=1: {why\n")
    assert load_config(AppConfig, presets=[file]) == config


def test_the_log_holds_the_console_output(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    before = (sys.stdout, sys.stderr)
    with pytest.raises(RuntimeError), run:  # noqa: PT012
        print("one")
        sys.stdout.write("10%\r20%\r\x1b[2K100% \x1b[1mdone\x1b[0m\n")
        sys.stderr.write("half a ")
        print("two")
        sys.stderr.write("line\n")
        logging.getLogger("rl_core.deep").info("our info")
        logging.getLogger("urllib3").info("their info")
        logging.getLogger("urllib3").warning("their warning")
        sys.stdout.write("unfinished")
        raise RuntimeError("the end")
    assert (sys.stdout, sys.stderr) == before
    lines = run.log_file.read_text().splitlines()
    assert lines[:4] == ["one", "100% done", "two", "half a line"]
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO rl_core.deep: our info", lines[4])
    assert lines[5].endswith("WARNING urllib3: their warning")
    assert "RuntimeError: the end" in lines
    assert lines[-1] == "unfinished"
    printed = capsys.readouterr()
    assert printed.out.startswith("one\n10%")
    assert "their info" not in printed.err


def test_a_long_progress_bar_does_not_grow_the_log(run: RunFolder) -> None:
    with run:
        for i in range(1000):
            sys.stdout.write(f"\rat {i}")
        print()
    assert run.log_file.read_text() == "at 999\n"


@given(st.text())
def test_visible_lines_have_no_control_characters(line: str) -> None:
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", visible_line(line))


def test_a_run_whose_folder_is_removed_ends_with_the_name_of_the_file(run: RunFolder) -> None:
    named = r"metrics\.tsv cannot be written: No such file"
    with pytest.raises(RunFolderError, match=named) as caught, Tracker(run, QUIET, num_steps=2) as tracker:  # noqa: PT012
        tracker.log(1, {"a": 1})
        shutil.rmtree(run.path)
        tracker.log_rollouts(1, [])
        tracker.log(2, {"a": 1})
    assert not run.path.exists()
    assert not [note for note in caught.value.__notes__ if "The traceback is in" in note], "there is no log"


def test_a_run_whose_folder_becomes_read_only_says_how_it_ended(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(source: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    named = r"step_000001\.jsonl cannot be written: Permission denied"
    with pytest.raises(RunFolderError, match=named), Tracker(run, QUIET, num_steps=2) as tracker:  # noqa: PT012
        tracker.log(1, {"a": 1})
        monkeypatch.setattr("run_kit.tracking.metrics_table.os.replace", replace)
        tracker.log_rollouts(1, [{"prompt": "p", "response": "r", "reward": 1.0}])
    state = json.loads(run.state_file.read_text())
    assert (state["state"], "cannot be written" in state["message"]) == ("failed", True)
    assert not list(run.path.glob("**/.*")), "no temporary file is left"


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_table_appends_and_grows(table: MetricsTable) -> None:
    table.log(1, {"a": 1, "b": 0.1 + 0.2})
    table.log(2, {"b": np.float32(0.1), "a": np.int64(2)})
    table.log(3, {"a": True, "late/one": 5.0})
    table.log(4, {"late/one": math.nan})
    table.log(4, {"a": 9})
    assert table.path.read_text() == (
        "step\ta\tb\tlate/one\n1\t1\t0.3\t\n2\t2\t0.100000001\t\n3\t1\t\t5\n4\t9\t\tnan\n"
    )
    assert table.series("late/one") == ([3], [5.0])
    assert list(table.path.parent.iterdir()) == [table.path]


ROWS = st.dictionaries(st.sampled_from(["a", "b/c", "d e", "é"]), st.integers() | st.floats(width=32), min_size=1)


@given(st.lists(ROWS, min_size=1, max_size=6))
def test_nothing_logged_is_lost(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, float]]) -> None:
    path = tmp_path_factory.mktemp("t") / "m.tsv"
    table = MetricsTable(path)
    for step, row in enumerate(rows):
        table.log(step, row)
    again = MetricsTable(path)
    assert again.columns == table.columns
    for step, row in enumerate(rows):
        for name, value in row.items():
            assert np.float32(again.row(step)[name]) == np.float32(value) or math.isnan(value)


def test_an_existing_table_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "m.tsv"
    path.write_text("step\ta\n1\t1\n2\t2\n3\t0.")
    table = MetricsTable(path)
    assert table.steps == (1, 2)
    table.truncate_from(2)
    assert table.steps == (1,)
    table.log(2, {"a": 5})
    assert path.read_text() == "step\ta\n1\t1\n2\t5\n"


@pytest.mark.parametrize(
    ("step", "metrics", "fields"),
    [
        (1, {"a": 1}, {"field": "step", "value": 1}),
        (6, {"a": "x"}, {"field": "a", "allowed": "one number"}),
        (6, {"a": np.ones(2)}, {"field": "a", "allowed": "one number"}),
        (6, {"a\tb": 1}, {"field": "name", "value": "a\tb"}),
        (6, {"step": 1}, {"field": "name", "value": "step"}),
        (6.0, {"a": 1}, {"field": "step", "value": 6.0}),
    ],
)
def test_bad_metrics_are_refused(
    table: MetricsTable, step: int, metrics: dict[str, object], fields: dict[str, object]
) -> None:
    table.log(5, {"a": 1})
    with raises(TrackingError, **fields):
        table.log(step, metrics)


@pytest.mark.parametrize("text", ["a\tb\n", "step\ta\n1\tx\n", "step\ta\n1\n"])
def test_invalid_tables(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.tsv").write_text(text)
    with pytest.raises(TrackingError):
        MetricsTable(tmp_path / "m.tsv")


def test_summaries() -> None:
    values = [0.0, 0.0, 1.0, math.nan, 2.0, 3.0, 10.0]
    assert tail_mean(values, 2) == 6.5
    assert first_mean(values, 3) == pytest.approx(1 / 3)
    summary = summarize(values)
    assert (summary.first_mean, summary.last_mean) == pytest.approx((6 / 5, 16 / 5))
    numbers = (summary.change, summary.minimum, summary.maximum, summary.last)
    assert numbers == pytest.approx((2.0, 0.0, 10.0, 10.0))
    assert math.isnan(summarize([]).last_mean)


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_values_that_are_not_finite_are_gaps(table: MetricsTable, tmp_path: Path) -> None:
    for step, value in enumerate([1.0, 2.0, math.nan, math.inf, 3.0, 4.0], start=1):
        table.log(step, {"actor/loss": value})
    steps, values = table.series("actor/loss", gaps=True)
    assert steps == [1, 2, 3, 4, 5, 6]
    assert values == pytest.approx([1.0, 2.0, math.nan, math.nan, 3.0, 4.0], nan_ok=True)
    assert write_curves(table, tmp_path / "curves.png") is not None
    writer = TensorBoardWriter(tmp_path / "tensorboard")
    writer.write(1, {"actor/loss": math.inf})
    writer.close()
    [(_, _, written)] = read_events(tmp_path / "tensorboard")
    assert math.isnan(written)


# --- rollouts ---------------------------------------------------------------------------------------------------------


def record(index: int) -> dict[str, object]:
    return {"prompt": f"p{index}", "response": f"r{index}\u2028\n", "reward": np.float32(index)}


def test_rollouts_are_a_repeatable_sample(tmp_path: Path) -> None:
    records = [record(i) for i in range(20)]
    path = write_rollouts(tmp_path, 3, records, count=4)
    assert path.name == "step_000003.jsonl"
    first = read_rollouts(tmp_path)
    write_rollouts(tmp_path, 3, records, count=4)
    assert read_rollouts(tmp_path) == first
    assert len(first) == 4
    assert first[0]["step"] == 3
    assert first[0]["response"].endswith("\u2028\n")


def test_rollouts_need_their_three_keys(tmp_path: Path) -> None:
    with raises(TrackingError, field="reward"):
        write_rollouts(tmp_path, 1, [{"prompt": "p", "response": "r"}])
    with pytest.raises(TrackingError, match="cannot be written as JSON"):
        write_rollouts(tmp_path, 1, [{"prompt": "p", "response": "r", "reward": object()}])


@given(st.integers(0, 50), st.integers(0, 60), st.integers(0, 5))
def test_samples_have_no_repeats(num: int, count: int, seed: int) -> None:
    chosen = choose_sample(num, count, seed=seed)
    assert len(chosen) == min(num, count)
    assert chosen == sorted(set(chosen))
    assert all(0 <= index < num for index in chosen)


# --- progress ---------------------------------------------------------------------------------------------------------


def test_progress_lines(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = Progress(30, clock=clock)
    clock.now += 4 + 110
    progress.step(1, score=0.5, throughput=1234.4, step_s=3.9)
    clock.now += 6
    progress.step(2, score=-0.25, extra={"kl": 0.0123456})
    clock.now += 4
    progress.step(30, score=1.0)
    assert capsys.readouterr().out == (
        "step  1/30  score  0.500    1,234 tok/s    3.9 s/step   1m53s left\n"
        "step  2/30  score -0.250    6.0 s/step  kl 0.0123   2m19s left\n"
        "step 30/30  score  1.000    4.0 s/step    done\n"
    )


def test_a_resumed_run_estimates_from_its_own_steps() -> None:
    clock = Clock()
    progress = Progress(100, clock=clock)
    assert math.isnan(progress.time_left_s)
    clock.now += 2
    progress.step(91, score=0)
    assert progress.time_left_s == 18


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (59.4, "59s"), (65, "1m05s"), (12000, "3h20m"), (187200, "2d04h"), (math.nan, "?")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


# --- the tracker ------------------------------------------------------------------------------------------------------


def read_events(folder: Path) -> list[tuple[int, str, float]]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    events = []
    for path in sorted(folder.iterdir()):
        for event in LegacyEventFileLoader(str(path)).Load():
            events += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return events


def test_a_run_leaves_everything(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with Tracker(run, AppConfig(seed=3), num_steps=6) as tracker:
        for step in range(1, 4):
            tracker.log_supervised(step, Stats())
        tracker.log_validation(0, {"val/accuracy": 0.25})
        rest = {"perf/throughput": 100.0, "timing_s/step": 2.0, "timing_s/gen": 1.5, "memory/host_peak_gib": 3.0}
        for step in range(1, 7):
            tracker.log(step, {"critic/score/mean": step / 10, **rest})
            tracker.log_rollouts(step, [{"prompt": "p", "response": "<b>r</b>", "reward": 1.0}] * 20)
        tracker.log_validation(6, {"val/accuracy": 0.75})
        facts = tracker.summary(Result())
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


def test_a_missing_tensorboard_is_reported(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with raises(TrackingError, field="tracking.tensorboard"):
        Tracker(run, TrackingConfig(), num_steps=1)


@pytest.mark.parametrize(
    ("field", "value"), [("rollouts_per_step", -1), ("memory_interval_s", 0.0), ("mlflow_uri", "http://host:5000")]
)
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
