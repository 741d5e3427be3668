"""`plinth runs`: what a run's folder says about it, checked against the processes of this host."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from plinth_testing import wait_until
from run_kit import RunFolder, Tracker, TrackingConfig, run_actions
from run_kit.runs import list_runs, main, to_text
from run_kit.tracking import run_state
from run_kit.tracking.run_state import RunState, lives, process_namespace, process_start, read_state, state_after

TRACKING = TrackingConfig(report=False, curves=False, tensorboard=False)
SLEEPER = """
import sys, time
from run_kit import RunFolder, Tracker, TrackingConfig
tracking = TrackingConfig(report=False, curves=False, tensorboard=False)
with Tracker(RunFolder.create(sys.argv[1], "sleeper"), tracking, num_steps=9) as tracker:
    tracker.log(1, {"a": 1.0})
    print("the last words", flush=True)
    time.sleep(60)
"""


def only(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def state(**changes: object) -> RunState:
    written = RunState(
        state="running", app="toy", num_steps=9, host="here", pid=os.getpid(),
        namespace=process_namespace(), started=process_start(os.getpid()), begun=1000.0,
    )  # fmt: skip
    return replace(written, **changes)  # type: ignore[arg-type]


def write_run(folder: Path, name: str, written: RunState | None) -> Path:
    run = folder / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("seed: 1\n")
    if written is not None:
        (run / "run.json").write_text(json.dumps(asdict(written)))
    return run


def test_a_running_run_is_told_from_a_killed_one(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SLEEPER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = iter(process.stdout)
    assert any("the last words" in line for line in lines)
    log = only(tmp_path) / "train.log"  # written after the terminal
    wait_until(lambda: "the last words\n" in log.read_text(), 10)
    try:
        (run,) = list_runs(tmp_path)
        assert (run.state, run.pid, run.step, run.num_steps) == ("running", process.pid, 1, 9)
        process.send_signal(signal.SIGSTOP)  # it hangs, but it is there
        assert list_runs(tmp_path)[0].state == "running"
    finally:
        process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is dead, and its parent has not asked yet
    (zombie,) = list_runs(tmp_path)
    process.wait()
    (run,) = list_runs(tmp_path)
    assert (zombie.state, run.state, run.detail) == ("died", "died", "the last words")


def test_how_a_run_ended_is_written(tmp_path: Path) -> None:
    for name, error in (("a", None), ("b", KeyboardInterrupt()), ("c", ValueError("line one\nline two"))):
        try:
            with Tracker(RunFolder.create(tmp_path, name), TRACKING, num_steps=3) as tracker:
                tracker.log(2, {"x": 1.0})
                assert read_state(tracker.run.state_file).state == "running"  # type: ignore[union-attr]
                if error is not None:
                    raise error
        except (KeyboardInterrupt, ValueError):
            pass
    listed = {run.name[0]: (run.state, run.detail, run.step, run.num_steps) for run in list_runs(tmp_path)}
    assert listed == {
        "a": ("finished", "", 2, 3),
        "b": ("stopped", "by SIGINT", 2, 3),
        "c": ("failed", "line one", 2, 3),
    }


def test_an_error_while_closing_is_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker(RunFolder.create(tmp_path, "x"), TRACKING, num_steps=3)

    def fail(*, failed: bool) -> None:
        raise OSError("no room")

    monkeypatch.setattr(tracker, "close", fail)
    with pytest.raises(OSError, match="no room"), tracker:
        pass
    assert [(run.state, run.detail) for run in list_runs(tmp_path)] == [("failed", "no room")]


def test_a_reused_pid_is_another_process(tmp_path: Path) -> None:
    assert lives(state()) is True
    assert lives(state(started="1")) is False
    assert lives(state(pid=2**22 + 1)) is False
    assert lives(state(namespace="another boot pid:[1]")) is None
    write_run(tmp_path, "x", state(started="1"))
    assert list_runs(tmp_path)[0].state == "died"


def test_a_run_on_another_host_is_judged_by_its_signs_of_life(tmp_path: Path) -> None:
    run = write_run(tmp_path, "x", state(namespace="elsewhere", host="node7"))
    os.utime(run / "run.json", (1, time.time() - 60))
    (listed,) = list_runs(tmp_path)
    assert listed.state == "running"
    assert re.fullmatch(r"on node7 \(not checked\), last sign of life 1m00s ago", listed.detail)
    os.utime(run / "run.json", (1, time.time() - run_state.STALE_S - 60))
    (listed,) = list_runs(tmp_path)
    assert listed.state == "died"
    assert listed.detail.startswith("on node7 (not checked), last sign of life 6m")


def test_a_run_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after its folder was out of reach for a while, as on a network disk."""
    monkeypatch.setattr(run_state, "HEARTBEAT_S", 0.05)
    with Tracker(RunFolder.create(tmp_path, "x"), TRACKING, num_steps=3) as tracker:
        tracker.run.path.rename(tmp_path / "away")
        time.sleep(0.2)
        (tmp_path / "away").rename(tracker.run.path)
        os.utime(tracker.run.state_file, (1, 1))
        wait_until(lambda: tracker.run.state_file.stat().st_mtime > 2)


def test_old_and_odd_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, "old", None)
    for name, text in (("torn", '{"state": "run'), ("later", '{"state": "running", "version": 2}'), ("list", "[]")):
        (write_run(tmp_path, name, None) / "run.json").write_text(text)
    (tmp_path / "no_run").mkdir()
    (tmp_path / "file").write_text("")
    run = write_run(tmp_path, "new", state(state="finished", begun=0.0))
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "latest").write_text("step_00000004\n")
    (run / "metrics.tsv").write_text("step\ta\n4\t1.0\n")
    monkeypatch.setattr(time, "time", lambda: 3600.0)
    listed = list_runs(tmp_path)
    assert [(each.name, each.state) for each in listed] == [
        ("new", "finished"), ("later", "unknown"), ("list", "unknown"), ("old", "unknown"), ("torn", "unknown")
    ]  # fmt: skip
    assert (listed[0].checkpoint, listed[0].step, listed[0].age_s) == ("step_00000004", 4, 3600.0)
    head, row = (line.split() for line in to_text(listed).splitlines()[:2])
    assert head == ["run", "state", "step", "checkpoint", "age", "host", "pid", "app"]
    assert row == ["new", "finished", "4/9", "step_00000004", "1h00m", "here", str(os.getpid()), "toy"]


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"state": ' * 100_000, '{"state": "running", "begun": "x"}', "\udcff"]
)
def test_a_state_that_is_none_does_not_hide_the_other_runs(tmp_path: Path, text: str) -> None:
    write_run(tmp_path, "x_20260102_030405", state(state="finished"))
    for name, content in (
        ("x_20260102_030406", text),
        ("x_20260102_030407", json.dumps(asdict(state(begun=1e300)))),
        ("x_20260102_030408", json.dumps({**asdict(state()), "pid": []})),
    ):
        (write_run(tmp_path, name, None) / "run.json").write_text(content, errors="surrogateescape")
    states = {run.name[-6:]: run.state for run in list_runs(tmp_path)}
    assert states == {"030405": "finished", "030406": "unknown", "030407": "running", "030408": "unknown"}
    assert RunFolder.create(tmp_path, "x", now=lambda: 0.0).name == "x_20260102_030409"


def test_endings_that_are_no_error() -> None:
    facts = {name: value for name, value in asdict(state()).items() if name not in ("state", "message")}
    assert state_after(SystemExit(0), facts).state == "finished"
    assert state_after(SystemExit(3), facts).message == "exit code 3"
    assert state_after(RuntimeError(), facts).message == "RuntimeError"
    assert len(state_after(RuntimeError("x" * 10_000), facts).message) == 300


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, "run_1", state())
    for arguments, code, words in (
        ([f"output_dir={tmp_path}"], 0, "run_1  running  0/9"),
        ([f"output_dir={tmp_path}", "--json"], 0, '"state": "running"'),
        ([f"output_dir={tmp_path / 'run_1'}"], 0, "no runs in"),
        (["output_dir=/nowhere"], 2, "does not exist, so it has no runs yet; give the parent of the run"),
        ([f"output_dir={tmp_path / 'run_1' / 'run.json'}"], 2, "is a file; give the parent of"),
        (["lst"], 2, "unknown action 'lst'; allowed: compare, open, or output_dir=FOLDER to list"),
        (["opne", "run_1"], 2, "unknown action 'opne'; nearest: open; allowed: compare, open"),
        (["--help"], 0, "output_dir: str = outputs"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        assert (ended.value.code, words in captured.out + captured.err) == (code, True), captured


@pytest.fixture
def two_runs(tmp_path: Path) -> Path:
    for name, score, seed, data in (("a=1", 0.25, 1, "null"), ("b", 0.5, 2, "[1, 2]")):
        further = score if name == "b" else ""
        run = write_run(tmp_path, name, state(state="finished"))
        (run / "metrics.tsv").write_text(f"step\tcritic/score/mean\tactor/x\n1\t{score}\t{further}\n")
        (run / "config.yaml").write_text(f"trainer: {{seed: {seed}, resume: auto}}\ndata: {data}\n")
    return tmp_path


def ending(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Exit code and output of `plinth runs`."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    captured = capsys.readouterr()
    return ended.value.code, captured.out + captured.err


def test_compare_shows_last_metrics_and_the_keys_that_differ(
    two_runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = f"output_dir={two_runs}"
    code, text = ending(["compare", "a=1", str(two_runs / "b"), folder, "metrics=actor/*"], capsys)
    rows = [re.split(r"\s{2,}", line) for line in text.splitlines()]
    assert code == 0
    assert rows[:3] == [["", "a=1", "b"], ["steps", "1", "1"], ["score, last five", "0.2500", "0.5000"]]
    assert rows[3:] == [
        ["actor/x", "0.5"],
        [""],
        ["keys that differ", "a=1", "b"],
        ["trainer.seed", "1", "2"],
        ["data", "null", "[1, 2]"],
    ]
    for arguments, words in (
        (["a=1", "bb"], "run: got 'bb'; neither a folder nor a run in"),
        (["a=1", "bb"], "nearest: b"),
        (["b", "c" * 5000], "ccc...ccc"),
        (["b"], "runs: got ('b',); allowed: two or more"),
        (["b", "b"], "allowed: different runs"),
        (["a=1", "b", "metrics=actor/y"], "matches no metric of these runs; nearest: actor/x"),
        (["a=1", "b", "metric=x"], "run: got 'metric=x'"),
    ):
        code, text = ending(["compare", *arguments, folder], capsys)
        assert (code, words in text) == (2, True), text


def test_open_writes_a_missing_or_old_report_and_opens_it(
    two_runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(run_actions.webbrowser, "open", lambda address: bool(opened.append(address)))
    page, metrics = two_runs / "b" / "report.html", two_runs / "b" / "metrics.tsv"
    arguments = ["open", "b", f"output_dir={two_runs}"]
    code, text = ending(arguments, capsys)
    assert (code, text.splitlines()[0], opened) == (0, str(page), [page.as_uri()])
    assert "no browser was found here" in text
    written = page.stat().st_mtime_ns
    assert ending([*arguments, "browser=false"], capsys) == (0, f"{page}\n")
    assert (page.stat().st_mtime_ns, len(opened)) == (written, 1)
    metrics.write_text(metrics.read_text() + "2\t0.7\t0.7\n")
    os.utime(metrics, ns=(0, written + 1))
    assert ending(arguments, capsys)[0] == 0
    assert page.stat().st_mtime_ns > written + 1, "metrics newer than the report: it is written again"
    for wrong, words in ((["a", "b"], "open takes one run, got a, b"), ([], "run: missing"), (["c"], "run: got 'c'")):
        code, text = ending(["open", *wrong], capsys)
        assert (code, words in text) == (2, True), text
    metrics.unlink()
    page.unlink()
    assert "metrics.tsv: " in ending(arguments, capsys)[1]
