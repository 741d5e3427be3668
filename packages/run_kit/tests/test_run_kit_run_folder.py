"""The folder of a run: its name, its config, its log, and its loss during the run."""

import errno
import json
import logging
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_kit_testkit import QUIET, Example

from plinth_testing import raises
from run_kit import (
    RunFolder,
    Tracker,
    runs_of_experiment,
)
from run_kit.config.loader import load_config
from run_kit.errors import RunFolderError, TrackingError
from run_kit.tracking.run_folder import visible_line


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


def test_folders_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises(TrackingError, field="output_dir", value=str(tmp_path / "file")):
        RunFolder.create(tmp_path / "file", "grpo")


def test_written_config_repeats_the_run(run: RunFolder) -> None:
    config = Example(seed=7)
    assert load_config(Example, presets=[run.write_config(config)]) == config
    file = run.write_config(config, "chosen:\nkey=1: {why")
    assert file.read_text().startswith("# chosen:\n# key=1: {why\n")
    assert load_config(Example, presets=[file]) == config


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
    tracker = Tracker(run, QUIET, num_steps=2)
    with raises(RunFolderError, field=str(run.metrics_file)) as caught, tracker:
        tracker.log(1, {"a": 1})
        shutil.rmtree(run.path)
        tracker.log_rollouts(1, [])
        tracker.log(2, {"a": 1})
    assert not run.path.exists()
    assert not [note for note in caught.value.__notes__ if "The traceback is in" in note], "there is no log"


@pytest.mark.parametrize("draws", [True, False])
def test_matplotlib_is_imported_once_the_last_step_is_logged(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, draws: bool
) -> None:
    imports: list[int] = []
    monkeypatch.setattr("run_kit.tracker.import_matplotlib", lambda: imports.append(len(tracker.table.steps)))
    tracker = Tracker(run, replace(QUIET, curves=draws), num_steps=2)
    tracker.log(1, {"a": 1})
    tracker.log(2, {"a": 1})
    tracker.close()
    assert imports == [2] * draws


def test_a_run_whose_folder_becomes_read_only_says_how_it_ended(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(source: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    tracker = Tracker(run, QUIET, num_steps=2)
    with raises(RunFolderError, field=str(run.rollouts_dir / "step_000001.jsonl")), tracker:
        tracker.log(1, {"a": 1})
        monkeypatch.setattr("run_kit.tracking.metrics_table.os.replace", replace)
        tracker.log_rollouts(1, [{"prompt": "p", "response": "r", "reward": 1.0}])
    state = json.loads(run.state_file.read_text())
    assert (state["state"], "cannot be written" in state["message"]) == ("failed", True)
    assert not list(run.path.glob("**/.*")), "no temporary file is left"
