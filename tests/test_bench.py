"""The benchmarks: planning and statistics as functions, the runner with a stand-in app, one case on the real stack."""

import contextlib
import csv
import gzip
import io
import json
import math
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.bench.config import SIX_CASES, AlgorithmsConfig, SixCaseConfig, StageGateConfig
from apps.bench.live import LiveTable, table_lines
from apps.bench.main import BENCHMARKS
from apps.bench.plan import Case, algorithm_name, plan_algorithms, plan_gate, plan_six, zero1_name, zero2_name
from apps.bench.report import write_report, write_tables
from apps.bench.results import (
    CaseResult,
    algorithm_rows,
    compare_rows,
    overall_rows,
    read_result,
    summary_rows,
    tsv_text,
)
from apps.bench.runner import finished, run_case
from apps.bench.statistics import Interval, judge, student_t_quantile
from apps.grpo.config import GrpoConfig
from apps.ppo.config import PpoConfig
from rl_runtime import InputError
from run_kit import load_config

REPO = Path(__file__).resolve().parents[1]
PRESETS = {"ppo": (PpoConfig, REPO / "apps/ppo/presets"), "grpo": (GrpoConfig, REPO / "apps/grpo/presets")}
CASE = Case(name="one", app="ppo", stage=1, offload="none", step_each_micro=False, seed=1, steps=3, arguments=("a=1",))


def resolved(case: Case) -> Any:
    """The case's configuration as its app reads it."""
    config, folder = PRESETS[case.app]
    named = [argument.partition("=") for argument in case.arguments]
    files = [folder / f"{value}.yaml" for key, _, value in named if key == "preset"]
    files += [folder / "overlays" / f"{value}.yaml" for key, _, value in named if key == "overlay"]
    overrides = [argument for argument in case.arguments if argument.partition("=")[0] not in ("preset", "overlay")]
    return load_config(config, presets=files, overrides=overrides)


def test_the_six_cases_have_the_documented_settings() -> None:
    cases = plan_six(SixCaseConfig(step_each_micro=True, steps=7, overlays=("tiny",), overrides=("sampling.n=2",)))
    assert [case.name for case in cases] == list(SIX_CASES)
    for case in cases:
        config = resolved(case)
        assert config.actor.zero.stage == config.critic.zero.stage == case.stage == int(case.name[4])
        assert config.actor.zero.offload.optimizer == config.critic.zero.offload.optimizer == case.offload
        assert config.critic.zero.step_each_micro == config.actor.zero.step_each_micro == (case.stage == 2)
        assert config.trainer.total_training_steps == 7
        assert config.trainer.seed == 7777
        assert config.model.path == "builtin:tiny"
        assert config.sampling.n == 2


@pytest.mark.parametrize("app", ["ppo", "grpo"])
def test_the_gate_runs_both_stages_with_every_seed(app: str) -> None:
    config = StageGateConfig(app=app, seeds=(7777, 1234), fp32_grad_accum=False)  # type: ignore[arg-type]
    cases = plan_gate(config)
    assert len({case.name for case in cases}) == len(cases) == 6
    for case in cases:
        found = resolved(case)
        assert (found.actor.zero.stage, found.trainer.seed) == (case.stage, case.seed)
        assert found.actor.zero.step_each_micro == case.step_each_micro == ("micro1" in case.name)
        assert found.actor.zero.fp32_grad_accum == (case.stage == 1)
    for seed in config.seeds:
        one, two = ({c.name: resolved(c) for c in cases}[name] for name in (zero1_name(seed), zero2_name(seed, True)))
        assert replace(two.actor, zero=one.actor.zero) == one.actor, "the stages differ in nothing else"
        assert two.trainer == one.trainer


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"run_tag": "a b"}, "run_tag"),
        ({"steps": 0}, "steps"),
        ({"retries": -1}, "retries"),
        ({"case_timeout_s": 0.0}, "case_timeout_s"),
        ({"output_dir": ""}, "output_dir"),
        ({"overrides": ("seed",)}, "overrides"),
        ({"overrides": ("trainer.seed=1",)}, "sets itself"),
        ({"seeds": ()}, "seeds"),
        ({"seeds": (1, 1)}, "seeds"),
        ({"confidence": 1.0}, "confidence"),
        ({"score_threshold": -0.1}, "score_threshold"),
    ],
)
def test_bad_settings(values: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        StageGateConfig(**values)


@pytest.mark.parametrize(
    ("confidence", "degrees", "expected"),
    [(0.95, 1, 12.7062), (0.95, 2, 4.30265), (0.95, 4, 2.77645), (0.99, 9, 3.24984), (0.9, 30, 1.69726)],
)
def test_student_t_agrees_with_tables(confidence: float, degrees: int, expected: float) -> None:
    assert student_t_quantile(confidence, degrees) == pytest.approx(expected, abs=1e-4)


NUMBERS = st.floats(-10, 10, allow_nan=False)


@given(st.lists(NUMBERS, min_size=1, max_size=8), st.floats(0, 5), NUMBERS)
def test_verdicts(differences: list[float], threshold: float, shift: float) -> None:
    allowed = Interval(low=-threshold, high=threshold)
    found = judge(differences, allowed, confidence=0.95)
    assert found.num_seeds == len(differences)
    if found.interval is not None:
        assert found.interval.low <= found.mean <= found.interval.high
        wider = judge(differences, allowed, confidence=0.99)
        assert wider.interval is not None
        assert wider.interval.contains(found.interval)
    assert {"pass": abs(found.mean) <= threshold, "fail": abs(found.mean) > threshold}.get(found.verdict, True)
    # What is not measured changes nothing; moving the differences moves the interval.
    assert judge([*differences, math.nan], allowed, confidence=0.95) == found
    moved = judge([value + shift for value in differences], allowed, confidence=0.95)
    assert moved.mean == pytest.approx(found.mean + shift, abs=1e-9)
    everything = Interval(low=-math.inf, high=math.inf)
    assert judge(differences, everything, confidence=0.95).verdict == "pass"


def test_without_measurements_there_is_no_verdict() -> None:
    assert judge([math.nan], Interval(low=0, high=1), confidence=0.9).verdict == "not measured"


def reached(score: float, throughput: float, memory: float = math.nan) -> CaseResult:
    return CaseResult(
        status="completed", score=score, throughput=throughput, peak_reserved_gb=memory, peak_host_gib=2.0
    )


def test_the_gates_tables() -> None:
    config = StageGateConfig(seeds=(1, 2, 3), step_each_micro=(False,))
    found = {zero1_name(seed): reached(0.5 + seed / 100, 1000.0, 10.0) for seed in config.seeds}
    found |= {zero2_name(seed, False): reached(0.5 + seed / 100, 700.0 + seed, 8.0) for seed in config.seeds}
    pairs = compare_rows(config, found)
    assert [row["seed"] for row in pairs] == [1, 2, 3]
    assert pairs[0]["throughput_delta"] == -299
    assert pairs[0]["peak_mem_reserved_gb_delta"] == -2
    overall = {row["metric"]: row for row in overall_rows(config, found)}
    assert overall["score"]["verdict"] == "pass"
    assert overall["score"]["delta_mean"] == pytest.approx(0)
    assert overall["throughput"]["verdict"] == "fail"
    assert overall["throughput"]["change_mean"] == pytest.approx(-0.298)
    assert overall["peak_mem_reserved_gb"]["verdict"] == "pass", "less memory is no fault"
    assert overall["mem_reserved_gb_tail5"]["verdict"] == "not measured"
    # A pair with a failed run says nothing.
    found[zero2_name(3, False)] = replace(found[zero2_name(3, False)], status="failed")
    assert {row["num_seeds"] for row in overall_rows(config, found)} <= {0, 2}


def test_tables_are_plain_tsv() -> None:
    rows = summary_rows([CASE], {"one": reached(0.5, math.nan)})
    (row,) = csv.DictReader(io.StringIO(tsv_text(rows)), delimiter="\t")
    assert row["case"] == "one"
    assert row["avg_score_tail5"] == "0.5"
    assert row["avg_throughput_tail5"] == ""
    assert tsv_text([]) == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_live_table() -> None:
    cases = [CASE, replace(CASE, name="another")]
    running = CaseResult(status="running", attempts=2, last_step=1, score=0.25, wall_s=65.0)
    lines = table_lines(cases, {"one": running})
    assert len({len(line) for line in lines}) == 1
    assert "running (attempt 2)" in lines[1]
    assert "1/3" in lines[1]
    assert "waiting" in lines[2]
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        table = LiveTable(cases, stream=stream, clock=lambda: 0.0)
        table.update("one", running)
        table.update("one", replace(running, last_step=2))
        table.update("one", replace(running, status="completed"))
        table.close()
    assert terminal.getvalue().count("\x1b[3F") == 2, "drawn over itself"
    assert "\x1b" not in pipe.getvalue()
    assert len(pipe.getvalue().splitlines()) == 2 + 3, "two changes, then the table"


APP = """
import sys, time
from pathlib import Path
from run_kit import RunFolder, Tracker, TrackingConfig

given = dict(argument.split("=", 1) for argument in sys.argv[1:])
tries = Path(given["tries"])
tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
if given.get("mistake"):
    print("error: a.b is 3; allowed: 1")
    sys.exit(2)
run = RunFolder.create(given["trainer.output_dir"], given["trainer.experiment"])
quiet = TrackingConfig(tensorboard=False, curves=False, report=False)
with Tracker(run, quiet, num_steps=3) as tracker:
    for step in range(1, 4):
        if len(tries.read_text()) <= int(given.get("failures", 0)) and step == 2:
            sys.exit("no more")
        tracker.log(step, {"critic/score/mean": step / 10, "perf/throughput": 100.0 * step, "timing_s/step": 1.0})
        time.sleep(float(given.get("pause", 0)))
"""


def go(folder: Path, case: Case = CASE, *, retries: int = 1, timeout_s: float = 60.0, **given: object) -> CaseResult:
    script = folder / "app.py"
    script.write_text(APP)
    given = {"tries": folder / f"{case.name}.tries", **given}
    command = [sys.executable, str(script), *(f"{key}={value}" for key, value in given.items())]
    return run_case(
        case, folder, retries=retries, timeout_s=timeout_s, on_progress=lambda _: None, command=lambda _: command
    )


def test_a_failed_case_is_retried_and_a_finished_one_is_skipped(tmp_path: Path) -> None:
    assert finished(CASE, tmp_path) is None
    assert read_result(tmp_path, status="running").last_step == 0, "a folder without a run"
    done = go(tmp_path, failures=1)
    assert (done.status, done.attempts, done.last_step) == ("completed", 2, 3)
    assert done.score == pytest.approx(0.2)
    assert (tmp_path / "one" / "train.log").exists()
    again = finished(CASE, tmp_path)
    assert again is not None
    assert replace(again, wall_s=done.wall_s) == done
    assert finished(replace(CASE, arguments=("a=2",)), tmp_path) is None, "another configuration is another case"
    assert [path.name for path in (tmp_path / "attempts").iterdir()] == ["one_1"], "what failed is kept"


def test_a_case_that_keeps_failing_keeps_its_results(tmp_path: Path) -> None:
    done = go(tmp_path, failures=9)
    assert (done.status, done.attempts, done.last_step) == ("failed", 2, 1)
    assert (tmp_path / "one" / "metrics.tsv").exists()
    assert finished(CASE, tmp_path) is None
    assert go(tmp_path, failures=0).status == "completed", "a second start runs it again"
    assert finished(CASE, tmp_path) is not None


def test_a_user_error_is_not_retried(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"case one was refused: a\.b is 3"):
        go(tmp_path, mistake=1)
    assert (tmp_path / "one.tries").read_text() == "x"


def test_a_case_ends_at_its_timeout(tmp_path: Path) -> None:
    done = go(tmp_path, retries=0, timeout_s=2.0, pause=60)
    assert done.status == "failed"
    assert done.wall_s < 30


def test_the_report(tmp_path: Path) -> None:
    config = StageGateConfig(seeds=(1,), step_each_micro=(False,), steps=3)
    cases = plan_gate(config)
    found = {case.name: go(tmp_path, case) for case in cases}
    write_tables(config, cases, found, tmp_path)
    write_report(config, cases, found, tmp_path, command="the command")
    text = (tmp_path / "report.md").read_text()
    for words in ("the command", "| z1_seed1 | completed | 3 |", "| pass |", "Python 3", "seeds: [1]", "curves.png"):
        assert words in text
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "z2_micro0_seed1" in (tmp_path / "report.html").read_text()
    for name, rows in (("summary", 2), ("compare", 1), ("overall", 5)):
        assert len((tmp_path / f"{name}.tsv").read_text().splitlines()) == 1 + rows


def test_the_documented_commands_are_right() -> None:
    text = (REPO / "docs" / "benchmarks.md").read_text()
    lines = [shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("plinth bench")]
    assert len(lines) >= 4
    presets = REPO / "apps" / "bench" / "presets"
    for _, _, name, *arguments in lines:
        cls, plan = BENCHMARKS[name]
        overlays = [presets / "overlays" / f"{a.partition('=')[2]}.yaml" for a in arguments if a.startswith("overlay=")]
        values = [a for a in arguments if not a.startswith(("overlay=", "--"))]
        assert plan(load_config(cls, presets=overlays, overrides=values))


def child_command_lines() -> Iterator[str]:
    """Of this process's running descendants; other tests of the worker may have left zombies."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            yield " ".join(child.cmdline())


def test_an_interrupt_ends_the_case(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 3.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            go(tmp_path, pause=300)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
    assert [line for line in child_command_lines() if str(tmp_path) in line] == []
    assert finished(CASE, tmp_path) is None


def command(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "apps.bench.main", *arguments]
    return subprocess.run(line, cwd=REPO, capture_output=True, text=True, check=False, timeout=timeout)


def test_the_command_line(tmp_path: Path) -> None:
    assert "six_case|stage_gate" in command("--help").stdout
    typo, bare = command("six_cases"), command()
    assert (typo.returncode, bare.returncode) == (2, 2)
    allowed = "allowed: six_case, stage_gate, algorithms; see plinth bench --help\n"
    assert typo.stderr == f"error: unknown benchmark 'six_cases'; nearest: six_case; {allowed}"
    assert bare.stderr == f"error: no benchmark is named; {allowed}"
    wrong = command("six_case", "overlay=tiny", f"output_dir={tmp_path}", "overrides=[actor.zero.stge=1]")
    assert wrong.returncode == 2, wrong.stderr
    assert "actor.zero.stage" in wrong.stderr, "the case's own error reaches the user"
    assert "zero1_no_offload" in wrong.stderr


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.e2e
def test_a_case_on_the_real_stack(tmp_path: Path) -> None:
    done = command(
        "six_case",
        "overlay=tiny",
        "steps=2",
        "cases=[zero2_no_offload]",
        "step_each_micro=true",
        f"output_dir={tmp_path}",
        'overrides=["trainer.profile_steps=[2]", "warm_start.steps=12", "reward.format_score=0.1"]',
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = tmp_path.iterdir()
    assert {path.name for path in folder.iterdir()} == {
        *("config.yaml", "summary.tsv", "curves.png", "report.md", "zero2_no_offload")
    }
    case = folder / "zero2_no_offload"
    (row,) = csv.DictReader((folder / "summary.tsv").open(), delimiter="\t")
    assert (row["status"], row["last_step"], row["skipped_micro_batches"]) == ("completed", "2", "0")
    assert float(row["avg_throughput_tail5"]) > 0

    # The parts of a step account for its wall time.
    steps = list(csv.DictReader((case / "metrics.tsv").open(), delimiter="\t"))
    assert [step["step"] for step in steps] == ["1", "2"]
    for step in steps:
        parts = {name: float(value) for name, value in step.items() if name.startswith("timing_s/")}
        whole, other = parts.pop("timing_s/step"), parts.pop("timing_s/other")
        assert sum(value for name, value in parts.items() if name.count("/") == 1) >= 0.95 * whole
        assert other <= 0.05 * whole

    # The trace has the work of the ranks and of the server, and the phases that asked for it.
    with gzip.open(case / "profile" / "step_000002.json.gz", "rt") as file:
        every = json.load(file)["traceEvents"]
    processes = {event["args"]["name"] for event in every if event["name"] == "process_name"}
    assert {"phases of the step", "rank 0", "rank 1", "server engine 1", "server front end 1"} <= processes
    events = [event for event in every if event["ph"] == "X"]
    names = {event["name"] for event in events}
    assert {"step", "gen", "update_actor", "update_critic", "values", "sync"} <= names, "the driver's phases"
    assert {"actor: train", "critic: train", "actor: log_probs", "push_weights"} <= names, "the rank's"
    spans = {event["name"]: event for event in events if event.get("cat") == "phase"}
    inner = [event for event in events if event["name"] == "actor: train"]
    outer = spans["step"]
    assert all(outer["ts"] - 1e3 <= event["ts"] <= outer["ts"] + outer["dur"] for event in inner)


def test_every_preset_runs_with_every_seed() -> None:
    config = AlgorithmsConfig(presets=("demo", "calculator"), seeds=(1, 5), steps=7)
    cases = plan_algorithms(config)
    assert [case.name for case in cases] == ["demo_seed1", "demo_seed5", "calculator_seed1", "calculator_seed5"]
    found = resolved(cases[3])
    assert (found.task.kind, found.trainer.seed, found.trainer.total_training_steps) == ("calculator", 5, 7)
    with pytest.raises(ValueError, match=r"presets contains 'nothing'; allowed: .*calculator.*demo"):
        AlgorithmsConfig(presets=("nothing",))


def test_a_preset_passes_only_if_it_gains_enough_with_every_seed() -> None:
    config = AlgorithmsConfig(presets=("demo", "calculator", "gsm8k"), seeds=(1, 2), min_gain=0.25)

    def case(before: float, after: float, status: str = "completed") -> CaseResult:
        return CaseResult(status=status, accuracy_before=before, accuracy_after=after, wall_s=10.0)

    reached = {
        algorithm_name("demo", 1): case(0.25, 0.75),
        algorithm_name("demo", 2): case(0.25, 0.5),
        algorithm_name("calculator", 1): case(0.25, 1.0),
        algorithm_name("calculator", 2): case(0.25, 0.45),
        algorithm_name("gsm8k", 1): case(0.25, 1.0),
        algorithm_name("gsm8k", 2): case(0.25, 1.0, "failed"),
    }
    rows = algorithm_rows(config, reached)
    assert [row["verdict"] for row in rows] == ["pass", "fail", "incomplete"]
    assert (rows[0]["gain_mean"], rows[0]["gain_min"]) == (0.375, 0.25)
    assert [row["verdict"] for row in algorithm_rows(config, {})] == ["incomplete"] * 3


def test_the_report_of_the_algorithms_has_a_curve_for_each_preset(tmp_path: Path) -> None:
    config = AlgorithmsConfig(presets=("demo",), seeds=(1,))
    (case,) = plan_algorithms(config)
    (tmp_path / case.name).mkdir()
    (tmp_path / case.name / "metrics.tsv").write_text("step\tcritic/score/mean\n1\t0.25\n2\t0.5\n")
    write_report(config, [case], {case.name: CaseResult(status="completed")}, tmp_path, command="x")
    assert "curves/demo.svg" in (tmp_path / "report.md").read_text()
    assert "seed 1" in (tmp_path / "curves/demo.svg").read_text()
