"""The cases of GRPO benchmarks without a run: their keys, columns and table; and how runs start and end."""

import json
import math
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from apps.grpo.config import GrpoConfig
from benchmarks.flops import PEAK_FLOPS, training_mfu
from benchmarks.grpo_step.cases import Case, Result, keep_steps, mfu, planned_gib, run_cases, start, table
from benchmarks.grpo_step.workload import settings
from benchmarks.memory_turns.run import CASES as TURNS
from benchmarks.random_model import CONFIGS
from benchmarks.runs import INTERRUPTED, TIMED_OUT, Run, Steps, first_step_s, interrupted, run_folder, visible_gpus
from benchmarks.scaling.run import CASES as SCALING
from benchmarks.scaling.run import COLUMNS
from benchmarks.staleness.run import CASES as STALENESS
from ds_engine import ModelShape
from ds_engine.planning.operations import forward_operations
from run_kit import MetricsTable, RunFolder, load_config

SHAPES = {name: ModelShape.read({"model_type": "qwen3", **fields}) for name, fields in CONFIGS.items()}


def test_mfu_is_one_where_the_gpus_do_nothing_else() -> None:
    flops = 3 * 8 * forward_operations(SHAPES["qwen3-4b"], prompt=100, response=300).total
    found = training_mfu(SHAPES["qwen3-4b"], prompt=100, response=300, sequences=8, gpu_seconds=flops / PEAK_FLOPS)
    assert found == pytest.approx(1.0)


def test_the_app_accepts_the_keys_of_every_case_and_scales_the_batch(tmp_path: Path) -> None:
    for case in (*SCALING.values(), *TURNS.values(), *STALENESS.values()):
        own = settings(tmp_path, 3, num_prompts=case.num_prompts)
        config = load_config(GrpoConfig, overrides=[*own, *case.keys])
        assert config.batch.train_batch_size == 2 * config.batch.mini_batch_size == case.num_prompts
    assert {
        case.num_prompts / case.gpus for name, case in SCALING.items() if name.startswith("w_") and name[2:3].isdigit()
    } == {64}
    assert all(case.relative_to in {"", *SCALING} for case in SCALING.values())
    assert all("actor.collective_guard=auto" in case.keys for case in SCALING.values())


def finished(folder: Path, log: str, seconds: list[float]) -> Result:
    """What a run of the case `x` with these steps leaves."""
    made = folder / "outputs" / "x_20260101_000000"
    metrics = MetricsTable(made / "metrics.tsv")
    made.mkdir(parents=True)
    for step, value in enumerate(seconds, 1):
        lengths = {"prompt_length/mean": 100.0, "response_length/mean": 300.0, "rollout/num_samples": 8}
        metrics.log(step, {"timing_s/step": value, "timing_s/update_actor": value / 2, **lengths})
    (made / "config.yaml").write_text("# chosen\ntrainer: {num_ranks: 2}\n")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3", **CONFIGS["qwen3-4b"]}))
    run = Run("x", [], folder / "x.log", "0")
    run.log.write_text(log)
    return Result(model=folder / "model", run=run, folder=run_folder(folder, "x"))


def test_columns_read_logs_and_metrics(tmp_path: Path) -> None:
    line = (
        "memory of a GPU in turns: 89.7 GiB for a rank at its peak and 3.0 GiB for a sleeping server; 22.2 GiB for the "
        "server (weights 14.2, KV cache 3.9) and 7.9 GiB for a waiting rank, of 140.4 GiB free\n"
    )
    result = finished(tmp_path, f"{line}ready after 20.5 s: inputs 1\nranks diverge in x\n", [9.0, 2.0, 4.0])
    assert planned_gib(result) == pytest.approx(92.7)
    assert math.isnan(first_step_s(result.run, result.folder)), "nobody started it"
    result.run.started = datetime(2025, 12, 31, 23, 59, 52).astimezone().timestamp()
    assert first_step_s(result.run, result.folder) == pytest.approx(8 + 29.5)
    flops = 3 * 8 * forward_operations(SHAPES["qwen3-4b"], prompt=100, response=300).total
    assert mfu(result) == pytest.approx(flops / (1.5 * 2 * PEAK_FLOPS)), "the median of the updates, on two ranks"
    row = {name: column(result) for name, column in COLUMNS.items()}
    assert (row["step"], row["divergences"], row["restarts of ranks"]) == (3.0, 1, 0)
    assert math.isnan(float(row["sync"]))
    beside = (
        "memory of a GPU: 29.9 GiB for a rank at its peak, 27.2 GiB for the server (weights 1.1), of 140.4 GiB free"
    )
    result.run.log.write_text(beside)
    assert planned_gib(result) == pytest.approx(57.1)
    result.run.log.write_text("")
    assert math.isnan(planned_gib(result))


def test_the_first_step_ended_a_few_seconds_after_the_command_in_any_time_zone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        run = Run("x", [], tmp_path / "x.log", "0")
        run.log.write_text("ready after 20.0 s: inputs 1\n")
        for _ in range(2):  # the second has a number behind the time
            run.started = time.time() - 5.0
            made = RunFolder.create(str(tmp_path / "outputs"), "x")
            MetricsTable(made.path / "metrics.tsv").log(1, {"timing_s/step": 2.0})
            assert first_step_s(run, made.path) == pytest.approx(27.0, abs=1.5)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_the_steps_that_another_trainer_prints_fill_the_columns(tmp_path: Path) -> None:
    script = "print('trl step 1: 9.00 s, 3.5 GB reserved'); print('trl step 2: 2.50 s, 4.5 GB reserved')"
    (tmp_path / "other.py").write_text(script)
    case, done = Case(gpus=1, peer=("benchmarks.runs",)), tmp_path / "outputs"
    assert start(tmp_path, "silent", case, [], 60.0)[1].steps.series("timing_s/step") == []
    run = Run("trl", [sys.executable, str(tmp_path / "other.py")], tmp_path / "trl.log", "")
    run.start()
    assert run.end(60.0) == 0
    keep_steps(run, tmp_path)
    assert len(list(done.iterdir())) == 2
    result = Result(model=tmp_path, run=run, folder=run_folder(tmp_path, "trl"))
    row = {name: column(result) for name, column in COLUMNS.items()}
    assert (row["step"], row["reserved GB"], len(result.steps)) == (2.5, 4.5, 2)
    assert math.isnan(float(row["MFU of updates"]))


def test_a_run_that_made_no_folder_has_no_metrics(tmp_path: Path) -> None:
    finished(tmp_path, "", [1.0])
    assert len(Steps(run_folder(tmp_path, "x"))) == 1
    assert run_folder(tmp_path, "y") is None
    assert len(Steps(None)) == 0
    assert math.isnan(Steps(None).median("timing_s/step"))
    assert run_folder(tmp_path, "x_20260101") is None, "no other run whose name begins alike"
    assert Steps(run_folder(tmp_path, "x")).median("timing_s/step") == 1.0, "one step alone is its own median"


def test_throughput_is_compared_with_one_gpu() -> None:
    cases = {"w_1": Case(gpus=1, relative_to="w_1"), "w_2": Case(gpus=2, relative_to="w_1"), "new": Case(gpus=1)}
    rows = {
        name: {"exit code": 0, "steps": 5, "tokens/s per GPU": speed} for name, speed in (("w_2", 90.0), ("w_1", 100.0))
    }
    lines = table(cases, ["tokens/s per GPU"], rows).splitlines()
    assert lines[0] == "| case | exit code | steps | tokens/s per GPU | relative per GPU |"
    assert lines[2:] == ["| w_1 | 0 | 5 | 100.00 | 1.00 |", "| w_2 | 0 | 5 | 90.00 | 0.90 |"]
    del rows["w_1"]
    assert table(cases, ["tokens/s per GPU"], rows).endswith("| w_2 | 0 | 5 | 90.00 | - |")


def test_a_case_of_the_folder_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer_config.json").touch()
    (tmp_path / "train.parquet").touch()
    row = {"exit code": 0, "steps": 3, "step": 1.5, "keys": [*settings(tmp_path, 3), "a.b=1"]}
    (tmp_path / "rows" / "one.json").write_text(json.dumps(row))
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path), "a.b=1"])
    with pytest.raises(SystemExit) as ended:
        run_cases("", {"one": Case(gpus=1)}, {"step": lambda _: 9.0}, steps=3, timeout_s=1.0)
    assert not ended.value.code
    assert "| one | 0 | 3 | 1.50 |" in capsys.readouterr().out


def test_gpus_are_counted_among_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(2, first=1) == "1,2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert (visible_gpus(2), visible_gpus(1, first=2), visible_gpus(1, first=3)) == ("4,6", "7", "")


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_run_ends_at_its_limit_with_what_it_started(tmp_path: Path) -> None:
    fast = ((signal.SIGTERM, 0.2),)
    run = Run("stubborn", [sys.executable, "-c", STUBBORN], tmp_path / "log", "", signals=fast)
    run.start()
    while not run.text.strip():
        time.sleep(0.05)
    assert run.end(0.1) == TIMED_OUT
    child = int(run.text)
    deadline = time.monotonic() + 20
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child still runs"
        time.sleep(0.05)
    assert run.report(TIMED_OUT) == f"\n## stubborn: exit code {TIMED_OUT}\n{child}"


def test_a_terminated_script_ends_its_run(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from benchmarks.runs import Run, parser

folder = parser("", steps=1, timeout_s=60).parse_args().folder
run = Run("sleeps", [sys.executable, "-c", "import time; time.sleep(600)"], folder / "log", "")
run.start()
print(run.process.pid, flush=True)
sys.exit(run.end(60))
"""
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.terminate()
        assert process.wait(30) == INTERRUPTED
    assert not psutil.pid_exists(pid)


def test_after_an_interrupt_nothing_starts(tmp_path: Path) -> None:
    run = Run("late", [sys.executable, "-c", ""], tmp_path / "log", "")
    interrupted.set()
    try:
        run.start()
        assert (run.end(1.0), run.text) == (INTERRUPTED, "")
    finally:
        interrupted.clear()
