"""The benchmarks: planning and verdicts as functions, the runner with a stand-in app, one case on the real stack."""

import contextlib
import csv
import gzip
import json
import math
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import apps.bench.main as bench
from apps.bench import runner
from apps.bench.config import SIX_CASES, SixCaseConfig, StageGateConfig
from apps.bench.plan import Case, gate_name, plan_gate, plan_six
from apps.bench.results import compare_rows, mean_interval, overall_rows, verdict
from apps.bench.runner import completed_row
from apps.grpo.config import GrpoConfig
from apps.ppo.config import PpoConfig
from apps.tables import Row, tsv_text
from plinth_testing import raises
from rl_runtime import InputError
from run_kit import load_config

REPO = Path(__file__).resolve().parents[1]
PRESETS = {"ppo": (PpoConfig, REPO / "apps/ppo/presets"), "grpo": (GrpoConfig, REPO / "apps/grpo/presets")}
CASE = Case(name="one", app="ppo", stage=1, offload="none", step_each_micro=0, seed=1, steps=3, arguments=())


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
        assert (config.trainer.total_training_steps, config.trainer.seed) == (7, 7777)
        assert (config.model.path, config.sampling.num_samples) == ("builtin:tiny", 2)


@pytest.mark.parametrize("app", ["ppo", "grpo"])
def test_the_gate_runs_both_stages_with_every_seed(app: str) -> None:
    config = StageGateConfig(app=app, seeds=(7777, 1234), fp32_grad_accum=False)  # type: ignore[arg-type]
    cases = {case.name: case for case in plan_gate(config)}
    assert len(cases) == 6
    for case in cases.values():
        settings = resolved(case)
        assert (settings.actor.zero.stage, settings.trainer.seed) == (case.stage, case.seed)
        assert settings.actor.zero.step_each_micro == case.step_each_micro == ("micro1" in case.name)
        assert settings.actor.zero.fp32_grad_accum == (case.stage == 1)
    for seed in config.seeds:
        one, two = (resolved(cases[gate_name(seed, each)]) for each in (None, True))
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
        ({"overrides": ("trainer.seed=1",)}, "overrides"),
        ({"seeds": ()}, "seeds"),
        ({"seeds": (1, 1)}, "seeds"),
        ({"confidence": 1.0}, "confidence"),
        ({"score_threshold": -0.1}, "score_threshold"),
    ],
)
def test_bad_settings_are_refused_by_name(values: dict[str, Any], word: str) -> None:
    with raises(InputError, field=word):
        StageGateConfig(**values)


NUMBERS = st.floats(-10, 10, allow_nan=False)


@given(st.lists(NUMBERS, min_size=2, max_size=8), st.floats(0, 5), NUMBERS)
def test_a_verdict_compares_the_interval_with_the_threshold(
    changes: list[float], threshold: float, shift: float
) -> None:
    low, high = mean_interval(changes, 0.95)
    assert low <= sum(changes) / len(changes) + 1e-9
    assert high >= sum(changes) / len(changes) - 1e-9
    wider = mean_interval(changes, 0.99)
    assert wider[0] <= low <= high <= wider[1]
    assert mean_interval([change + shift for change in changes], 0.95) == pytest.approx((low + shift, high + shift))
    word = verdict((low, high), (-threshold, threshold))
    assert (word == "pass") == (-threshold <= low and high <= threshold)
    assert (word == "fail") == (high < -threshold or low > threshold)
    assert verdict((low, high), (-math.inf, math.inf)) == "pass"


def test_the_interval_of_a_mean_agrees_with_tables_of_students_t() -> None:
    low, high = mean_interval([-1.0, 0.0, 1.0], 0.95)  # t(0.975, 2) = 4.30265, deviation 1
    assert (low, high) == pytest.approx((-4.30265 / 3**0.5, 4.30265 / 3**0.5), abs=1e-4)
    assert mean_interval([0.5], 0.95) == (0.5, 0.5)
    assert verdict(mean_interval([], 0.95), (0, 1)) == "not measured"


def row(case: str, score: float, throughput: float, memory: float) -> Row:
    keys = {"avg_score_tail5": score, "avg_throughput_tail5": throughput, "peak_mem_reserved_gb": memory}
    return {"case": case, "status": "completed", **keys}


def test_the_tables_of_a_gate_pair_the_cases_of_each_seed() -> None:
    config = StageGateConfig(seeds=(1, 2, 3), step_each_micro=(False,))
    summary = [row(gate_name(seed, None), 0.5 + seed / 100, 1000.0, 10.0) for seed in config.seeds]
    summary += [row(gate_name(seed, False), 0.5 + seed / 100, 700.0 + seed, 8.0) for seed in config.seeds]
    pairs = compare_rows(config, summary)
    assert [pair["seed"] for pair in pairs] == [1, 2, 3]
    assert (pairs[0]["throughput_delta"], pairs[0]["peak_mem_reserved_gb_delta"]) == (-299, -2)
    overall = {row["metric"]: row for row in overall_rows(config, pairs)}
    assert overall["score"]["verdict"] == "pass"
    assert overall["score"]["delta_mean"] == pytest.approx(0)
    assert overall["throughput"]["verdict"] == "fail"
    assert overall["throughput"]["change_mean"] == pytest.approx(-0.298)
    assert overall["peak_mem_reserved_gb"]["verdict"] == "pass", "less memory is no fault"
    assert overall["mem_reserved_gb_tail5"]["verdict"] == "not measured"
    # A pair with a failed run says nothing.
    summary[-1]["status"] = "failed"
    assert {row["num_seeds"] for row in overall_rows(config, compare_rows(config, summary))} <= {0, 2}


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


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cases run a stand-in instead of their app; `failures`, `mistake` and `pause` are its arguments."""
    script = tmp_path / "app.py"
    script.write_text(APP)
    monkeypatch.setattr(runner, "app_command", lambda _: [sys.executable, str(script), f"tries={tmp_path / 'tries'}"])
    return tmp_path


def go(folder: Path, *, retries: int = 1, timeout_s: float = 60.0, **given: object) -> Row:
    case = replace(CASE, arguments=tuple(f"{key}={value}" for key, value in given.items()))
    return runner.run_case(case, folder, SixCaseConfig(retries=retries, case_timeout_s=timeout_s))


def test_a_failed_case_is_retried_and_a_completed_one_is_skipped(stand_in: Path) -> None:
    case = replace(CASE, arguments=("failures=1",))
    assert completed_row(case, stand_in) is None
    done = go(stand_in, failures=1)
    assert (done["status"], done["attempts"], done["last_step"]) == ("completed", 2, 3)
    assert done["avg_score_tail5"] == pytest.approx(0.2)
    assert (stand_in / "one" / "train.log").exists()
    again = completed_row(case, stand_in)
    assert again is not None
    assert tsv_text([again]) == tsv_text([done])
    assert completed_row(CASE, stand_in) is None, "another configuration is another case"
    assert [path.name for path in (stand_in / "attempts").iterdir()] == ["one_1"], "what failed is kept"


def test_a_case_that_keeps_failing_keeps_its_results(stand_in: Path) -> None:
    done = go(stand_in, failures=2)
    assert (done["status"], done["attempts"], done["last_step"]) == ("failed", 2, 1)
    assert (stand_in / "one" / "metrics.tsv").exists()
    assert completed_row(replace(CASE, arguments=("failures=2",)), stand_in) is None
    assert go(stand_in, failures=2)["status"] == "completed", "a second start runs it again"


def test_a_user_error_is_not_retried(stand_in: Path) -> None:
    with pytest.raises(InputError, match=r"case one was refused: a\.b is 3"):
        go(stand_in, mistake=1)
    assert (stand_in / "tries").read_text() == "x"


def test_a_case_ends_at_its_timeout(stand_in: Path) -> None:
    done = go(stand_in, retries=0, timeout_s=1.0, pause=60)
    assert done["status"] == "failed"
    assert done["wall_s"] < 30


def test_an_interrupt_ends_the_case(stand_in: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            go(stand_in, pause=300)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
    commands = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # zombies of other tests
            commands.append(" ".join(child.cmdline()))
    assert not [command for command in commands if str(stand_in) in command]


def test_a_gate_writes_its_tables_and_report(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = StageGateConfig(seeds=(1,), step_each_micro=(False,), steps=3, output_dir=str(stand_in / "out"))
    assert bench.run(config, plan=plan_gate, command="the command") == 0
    (folder,) = (stand_in / "out").iterdir()
    text = (folder / "report.md").read_text()
    for words in ("the command", "| z1_seed1 | ppo | 1 |", "| pass |", "Python version", "seeds: [1]"):
        assert words in text
    assert "z2_micro0_seed1" in (folder / "report.html").read_text()
    for name, rows in (("summary", 2), ("compare", 1), ("overall", 5)):
        assert len((folder / f"{name}.tsv").read_text().splitlines()) == 1 + rows
    (first, _) = csv.DictReader((folder / "summary.tsv").open(), delimiter="\t")
    assert (first["avg_score_tail5"], first["peak_mem_reserved_gb"]) == ("0.2", ""), "empty: not measured"
    assert "throughput" in capsys.readouterr().out


def test_the_documented_commands_are_right() -> None:
    text = (REPO / "docs" / "benchmarks.md").read_text()
    lines = [shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("plinth bench")]
    assert len(lines) >= 4
    presets = REPO / "apps" / "bench" / "presets"
    for _, _, name, *arguments in lines:
        cls, plan = bench.BENCHMARKS[name]
        overlays = [presets / "overlays" / f"{a.partition('=')[2]}.yaml" for a in arguments if a.startswith("overlay=")]
        values = [a for a in arguments if not a.startswith(("overlay=", "--"))]
        first, *_ = plan(load_config(cls, presets=overlays, overrides=values))
        assert resolved(first).trainer.total_training_steps == first.steps


def test_an_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(["six_cases"])
    assert caught.value.code == 2
    assert "'six_cases'; allowed: six_case, stage_gate" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.e2e
def test_a_case_is_measured_and_traced_on_the_real_stack(tmp_path: Path) -> None:
    overrides = ["trainer.profile_steps=[2]", "warm_start.steps=12", "reward.format_score=0.1"]
    keys = ["overlay=tiny", "steps=2", "cases=[zero2_no_offload]", "step_each_micro=true", f"output_dir={tmp_path}"]
    command = [sys.executable, "-m", "apps.bench.main", "six_case", *keys, f"overrides={json.dumps(overrides)}"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = tmp_path.iterdir()
    assert {path.name for path in folder.iterdir()} == {
        *("config.yaml", "summary.tsv", "report.md", "zero2_no_offload", "attempts")
    }
    case = folder / "zero2_no_offload"
    (row,) = csv.DictReader((folder / "summary.tsv").open(), delimiter="\t")
    assert (row["status"], row["last_step"], row["skipped_micro_batches"]) == ("completed", "2", "0")
    assert float(row["avg_throughput_tail5"]) > 0

    traces = {path.name.partition(".")[0]: path for path in (case / "profile" / "step_000002").iterdir()}
    assert {"rank_0", "rank_1", "server_engine_1", "server_front_end_1"} <= traces.keys()
    with gzip.open(traces["rank_0"], "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"actor: train", "critic: train", "actor: log_probs", "push_weights"} <= names, "the rank's"
