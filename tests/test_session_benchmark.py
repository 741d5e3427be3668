"""benchmarks/session without GPUs: what may start when, what its plans start, what a call keeps, and how it goes on."""

import argparse
import importlib
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.bench.config import SixCaseConfig, StageGateConfig
from apps.bench.plan import Case, plan_gate, plan_six
from apps.evaluate.config import EvaluateConfig
from apps.grpo.config import GrpoConfig
from apps.ppo.config import PpoConfig
from apps.sft.config import SftConfig
from benchmarks.grpo_step import workload
from benchmarks.reliability.run import command as bench_command
from benchmarks.runs import interrupted
from benchmarks.session.__main__ import GRACE_S, main, session, show
from benchmarks.session.plan import (
    PLANS,
    Measurement,
    Start,
    calls,
    next_start,
    read_plan,
    schedule,
    share_of_cores,
    unfinished,
)
from benchmarks.session.summary import joined_tables
from benchmarks.small_cards.run import PRESETS, keys
from run_kit import load_config

APPS = Path(__file__).resolve().parents[1] / "apps"
CALLS = {"one_gpu": (1, 3), "one_gpu_more": (1, 3), "two_gpus": (2, 6), "two_gpus_more": (2, 10), "eight_gpus": (8, 4)}
"""Plan -> GPUs, and calls of 9.5 minutes if every measurement lasts as expected."""
BENCHES: dict[str, tuple[type[Any], Callable[[Any], list[Case]]]] = {
    "six_case": (SixCaseConfig, plan_six),
    "stage_gate": (StageGateConfig, plan_gate),
}


@st.composite
def plans(draw: st.DrawFn) -> list[Measurement]:
    found = []
    for number in range(draw(st.integers(0, 9))):
        seconds = draw(st.integers(1, 60))
        found.append(
            Measurement(
                name=f"m{number}",
                command="python",
                gpus=draw(st.integers(0, 9)),
                seconds=seconds,
                limit=seconds + draw(st.integers(0, 40)),
                alone=draw(st.booleans()),
            )
        )
    return found


@given(plans(), st.integers(0, 8), st.integers(1, 200), st.integers(0, 2**32))
def test_a_call_uses_the_gpus_there_are_keeps_the_order_and_ends_in_time(
    plan: list[Measurement], num_gpus: int, seconds: int, seed: int
) -> None:
    def lasts(each: Measurement) -> float:
        return 1 + (seed >> 3 * plan.index(each)) % round(1.5 * each.limit)  # whole seconds, some beyond the limit

    made = list(schedule(plan, num_gpus=num_gpus, seconds=seconds, lasts=lasts))
    names = [start.measurement.name for _, _, start in made]
    assert names == [each.name for each in plan if each.name in names], "in the plan's order, each once"
    for begin, end, start in made:
        assert end - begin <= start.limit <= start.measurement.limit
        assert begin + start.limit <= seconds
        assert begin + start.measurement.seconds <= seconds, "there was time for it"
        assert len(set(start.gpus)) == start.measurement.gpus
        assert set(start.gpus) <= set(range(num_gpus))
        beside = [other for at, until, other in made if other is not start and at <= begin < until]
        assert not beside or not (start.measurement.alone or any(other.measurement.alone for other in beside))
        assert not {gpu for other in beside for gpu in other.gpus} & set(start.gpus)


@given(plans(), st.integers(0, 8))
def test_calls_run_everything_that_the_machine_and_the_time_allow(plan: list[Measurement], num_gpus: int) -> None:
    made = [start.measurement for call in calls(plan, num_gpus=num_gpus, seconds=50) for _, _, start in call]
    assert sorted(each.name for each in made) == sorted(
        each.name for each in plan if each.gpus <= num_gpus and each.seconds <= 50
    )


def test_none_overtakes_the_first_that_waits() -> None:
    long = Measurement(name="long", command="x", gpus=1, seconds=9, limit=9)
    both = Measurement(name="both", command="x", gpus=2, seconds=1, limit=9)
    running = [Start(measurement=long, gpus=(0,), limit=9)]
    assert next_start([both, long], running, num_gpus=2, left_s=20) is None
    assert next_start([both, long], running, num_gpus=1, left_s=20) is None, "long has no GPU left"
    started = next_start([both, long], [], num_gpus=1, left_s=20)
    assert started == Start(measurement=long, gpus=(0,), limit=9), "both can never start here"


@given(st.integers(1, 8), st.integers(1, 128))
def test_cores_are_shared_in_proportion(num_gpus: int, num_cores: int) -> None:
    cores = list(range(num_cores))
    parts = [share_of_cores((gpu,), num_gpus=num_gpus, cores=cores) for gpu in range(num_gpus)]
    if num_cores >= num_gpus:
        assert [core for part in parts for core in part] == cores
    assert share_of_cores(range(num_gpus), num_gpus=num_gpus, cores=cores) == cores
    assert share_of_cores((), num_gpus=num_gpus, cores=cores) == cores


class Parsed(Exception):
    def __init__(self, known: argparse.Namespace, extra: list[str]) -> None:
        self.known, self.extra = known, extra


def parsed(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> tuple[str, argparse.Namespace, list[str]]:
    """The module of a command `python -m …`, and what its argument parser makes of the rest.

    Raises:
        AssertionError: the parser refuses them.
    """
    assert words[:2] == ["python", "-m"]
    at = max(index for index, word in enumerate(words) if word == "-m") + 1  # behind torch's launcher
    module, known_args = words[at], argparse.ArgumentParser.parse_known_args

    def stop(self: Any, args: Any = None, namespace: Any = None) -> Any:
        raise Parsed(*known_args(self, words[at + 1 :]))

    def stop_strictly(self: Any, args: Any = None, namespace: Any = None) -> Any:
        known, extra = known_args(self, words[at + 1 :])
        assert not extra, f"{module} has no arguments {extra}"
        raise Parsed(known, extra)

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        patched.setattr(argparse.ArgumentParser, "parse_args", stop_strictly)
        patched.setattr(sys, "argv", [module])
        try:
            importlib.import_module(module).main()
        except Parsed as found:
            return module, found.known, found.extra
        except SystemExit as error:
            raise AssertionError(f"{shlex.join(words)} is refused") from error
    raise AssertionError(f"{module} parses no arguments")


def check_keys(module: str, known: argparse.Namespace, extra: list[str], folder: Path) -> None:
    """Loads the configuration of every run that the command starts; raises ConfigError for a key that is none."""
    if module.endswith("rollout.evaluate"):
        load_config(EvaluateConfig, overrides=extra)
    elif module.endswith(("scaling.run", "staleness.run", "memory_turns.run")):
        for case in map(importlib.import_module(module).CASES.get, known.cases):
            num_prompts = case.num_prompts
            own = workload.settings(folder, known.steps, num_prompts=num_prompts)
            config = load_config(GrpoConfig, overrides=[*own, *case.keys, *extra])
            assert num_prompts <= 64 * 64 // known.steps, "there are prompts for every step"
            assert config.trainer.total_training_steps == known.steps
    elif module.endswith("grpo_step.compare"):
        load_config(GrpoConfig, overrides=[*workload.settings(folder, known.steps), *extra])
    elif module.endswith("small_cards.run"):
        for part in known.parts:
            preset, *own = keys(folder, part, known.steps, known.gpus)
            file = APPS / part / "presets" / f"{PRESETS[part]}.yaml"
            assert preset == f"preset={PRESETS[part]}"
            load_config({"sft": SftConfig, "grpo": GrpoConfig}[part], presets=[file], overrides=[*own, *extra])
    elif module.endswith("reliability.run"):
        kind, plan = BENCHES[known.kind]
        words = bench_command(folder, known.kind, known.steps, known.more, extra)[4:]
        overlays = [
            APPS / "bench/presets/overlays" / f"{word[8:]}.yaml" for word in words if word.startswith("overlay=")
        ]
        bench = load_config(kind, presets=overlays, overrides=[w for w in words if not w.startswith("overlay=")])
        for case in plan(bench):
            names = [word.partition("=") for word in case.arguments]
            files = {"preset": APPS / "ppo/presets", "overlay": APPS / "ppo/presets/overlays"}
            presets = [files[key] / f"{value}.yaml" for key, _, value in names if key in files]
            rest = ["".join(parts) for parts in names if parts[0] not in files]
            load_config(PpoConfig, presets=presets, overrides=rest)
    else:
        assert not extra, f"{module} has no arguments {extra}"


@pytest.mark.parametrize("name", sorted(CALLS))
@pytest.mark.parametrize("trial", [False, True])
def test_every_command_of_a_plan_is_one_that_its_script_and_the_apps_accept(
    name: str, trial: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in read_plan(PLANS / f"{name}.yaml", trial=trial):
        words = each.arguments(tmp_path)
        if words[0] == "env":
            words = words[words.index("python") :]
        if words[:3] == ["python", "-m", "pytest"]:
            paths = [word for word in words if word.startswith("packages/")]
            assert paths
            assert all((APPS.parent / path).is_dir() for path in paths)
            continue
        module, known, extra = parsed(words, monkeypatch)
        check_keys(module, known, extra, tmp_path)
        for name_of_case in getattr(known, "cases", ()):
            if peer := importlib.import_module(module).CASES[name_of_case].peer:
                own = ["python", "-m", peer[0], "FOLDER", f"--steps={known.steps}", *peer[1:], *known.peer_args.split()]
                assert parsed(own, monkeypatch)[2] == []
        if not trial:
            gpus = getattr(known, "gpus", None)
            peers = int(getattr(known, "peer", "none") != "none")  # each has a GPU of its own
            assert gpus is None or gpus + peers == each.gpus, f"{each.name} takes other GPUs than it says"


def test_the_calls_of_each_plan_are_those_that_it_says() -> None:
    assert {path.stem for path in PLANS.glob("*.yaml")} == set(CALLS)
    for name, (num_gpus, num_calls) in CALLS.items():
        plan = read_plan(PLANS / f"{name}.yaml")
        made = calls(plan, num_gpus=num_gpus, seconds=9.5 * 60 - GRACE_S)
        assert len(made) == num_calls
        assert sum(map(len, made)) == len(plan), "everything is run"


def call(folder: Path, *, gpus: int, minutes: float) -> argparse.Namespace:
    """The arguments of a call."""
    return argparse.Namespace(folder=folder / "out", work=None, plan="plan", gpus=gpus, minutes=minutes, only=None)


def test_a_call_keeps_partial_tables_and_the_next_one_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")

    def measurement(name: str, code: str) -> Measurement:
        (tmp_path / f"{name}.py").write_text(
            f"import sys, time\nprint('| case | s |\\n| --- | --- |', flush=True)\n{code}"
        )
        command = f"python {tmp_path}/{name}.py"
        return Measurement(name=name, command=command, gpus=1, seconds=0.1, limit=5.0, alone=name == "whole")

    row = "import os; print('| {0} |', os.environ['CUDA_VISIBLE_DEVICES'], '|', flush=True)\n"
    plan = [
        measurement("whole", row.format("a")),
        measurement("cut", row.format("b") + "time.sleep(60)"),
        measurement("broken", row.format("c") + "sys.exit('no such thing')"),
    ]
    args = call(tmp_path, gpus=2, minutes=1.0)
    records = dict(session(plan, args))
    assert {name: record["ended"] for name, record in records.items()} == {
        "whole": "done",
        "cut": "limit",
        "broken": "failed",
    }
    summary = (args.folder / "summary.md").read_text()
    assert "| a | 5 |\n| b | 5 |" in summary, "the tables of both are joined, each had the first visible GPU"
    assert "no such thing" in summary
    assert "| c | 7 |" in records["broken"]["output"], "beside the one on the first GPU"
    assert (args.folder / "raw.zip").is_file()
    assert [each.name for each in unfinished(plan, records)] == ["broken"]
    measurement("broken", row.format("c"))
    again = session(plan, args)
    assert {name: record["ended"] for name, record in again.items()} == {
        "whole": "done",
        "cut": "limit",
        "broken": "done",
    }
    assert again["cut"] == records["cut"], "what is there is not run again"
    assert len((args.folder / "records.jsonl").read_text().splitlines()) == 4


def test_a_measurement_whose_package_is_not_installed_is_skipped_until_it_is(tmp_path: Path) -> None:
    lacking = Measurement(name="peer", command="python -c ''", gpus=0, seconds=1, limit=5, needs="no_such_package")
    there = replace(
        lacking, name="own", command="env A=b python -c 'import os; print(os.environ[\"A\"])'", needs="yaml"
    )
    args = call(tmp_path, gpus=0, minutes=1.0)
    records = session([lacking, there], args)
    assert records["peer"]["ended"] == "skipped"
    assert (records["own"]["ended"], records["own"]["output"]) == ("done", "b")
    assert "needs no_such_package, which is not installed" in (args.folder / "summary.md").read_text()
    assert session([replace(lacking, needs="yaml"), there], args)["peer"]["ended"] == "done"


def test_a_call_without_time_starts_nothing_and_an_interrupt_ends_what_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = [Measurement(name="long", command="python -c 'import time; time.sleep(60)'", gpus=0, seconds=1, limit=60)]
    args = call(tmp_path, gpus=0, minutes=GRACE_S / 60)
    assert session(plan, args) == {}
    assert "long: not started, needs 1 s, 0 are left" in capsys.readouterr().out
    args.minutes = (GRACE_S + 2.5) / 60
    assert session(plan, args)["long"]["ended"] == "call"
    assert [each.name for each in unfinished(plan, session(plan, args))] == ["long"]
    interrupted.set()
    try:
        (args.folder / "records.jsonl").unlink()
        assert session(plan, args) == {}
    finally:
        interrupted.clear()


def test_a_dry_run_shows_the_chosen_measurements_and_those_that_no_call_can_hold(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = {"short": 60, "long": 300, "other": 60}
    plan = [Measurement(name=name, command="true", gpus=1, seconds=s, limit=400) for name, s in sizes.items()]
    args = call(Path("x"), gpus=1, minutes=(GRACE_S + 250) / 60)
    args.only = ["short", "long"]
    show(plan, args)
    assert capsys.readouterr().out.splitlines() == [
        "call 1:",
        "    0 to   60 s, GPUs 0: short: true",
        "long: needs 300 s on 1 GPUs, more than a call of 250 s on 1",
    ]


def test_a_name_that_the_plan_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["session", "x", "one_gpu", "--gpus", "1", "--dry-run", "--only", "w", "v"])
    with pytest.raises(SystemExit):
        main()
    assert "--only v: one_gpu has w, " in capsys.readouterr().err


def test_tables_of_cases_are_joined_if_several_outputs_have_them() -> None:
    one = "| case | y |\n| --- | --- |\n| a | 2 |\n"
    two = "text\n| case | y |\n| --- | --- |\n| a | 3 |\n| b | 5 |\n| step | s |\n"
    steps = "| step | s |\n| --- | --- |\n| 1 | 9 |\n\n"
    other = "| case | z |\n| --- | --- |\n| a | 1 |"
    assert joined_tables([one + "\n" + steps, two, steps + other]) == [
        "| case | y |\n| --- | --- |\n| a | 3 |\n| b | 5 |\n| step | s |"
    ]
    assert joined_tables([one, steps, steps]) == []


def test_the_folder_takes_the_place_of_a_whole_word(tmp_path: Path) -> None:
    each = Measurement(name="a", command="env VLLM_WORKER=fork x=WORK/w WORK", gpus=0, seconds=1, limit=1)
    assert each.arguments(tmp_path) == ["env", "VLLM_WORKER=fork", f"x={tmp_path}/w", str(tmp_path)]


def test_a_plan_with_a_wrong_measurement_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    row = "{name: a, command: x, gpus: 1, seconds: 5}"
    for text, error in (
        (f"measurements: [{row}]", TypeError),
        (f"common: {{limit: 9}}\nmeasurements: [{row}, {row}]", ValueError),
        (f"common: {{limit: 4}}\nmeasurements: [{row}]", ValueError),
        (f"common: {{limit: 9, other: 1}}\nmeasurements: [{row}]", TypeError),
    ):
        path.write_text(text)
        with pytest.raises(error):
            read_plan(path)
    path.write_text(f"trials: {{T: a b}}\ncommon: {{limit: 9, trial: T c}}\nmeasurements: [{row}]")
    assert read_plan(path, trial=True)[0].arguments(tmp_path) == ["x", "a", "b", "c"]
    assert read_plan(path)[0].arguments(tmp_path) == ["x"]
