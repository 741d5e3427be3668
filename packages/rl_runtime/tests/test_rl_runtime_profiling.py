import gzip
import json
from pathlib import Path

import pytest
import torch

from rl_runtime.config import TrainerConfig
from rl_runtime.ranks.trainer_worker import RankProfiler
from run_kit.profiling import DRIVER_PID, StepProfiler, phase_events
from run_kit.timing import PhaseTimer, Span


def train() -> None:
    with torch.profiler.record_function("actor: train"):
        weight = torch.ones(32, 32, requires_grad=True)
        (weight @ weight).sum().backward()


def run_steps(folder: Path, *, steps: list[int]) -> None:
    profiler = StepProfiler(RankProfiler(), folder, steps)
    for step in (1, 2, 3):
        timer = PhaseTimer()
        with profiler.step(step, timer), timer.step():
            with timer.phase("gen"):
                torch.ones(8).sum()
            with timer.phase("update_actor"):
                train()


def test_a_trace_holds_the_rank_and_the_phases_on_one_clock(tmp_path: Path) -> None:
    run_steps(tmp_path / "profile", steps=[2])
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name == "step_000002.json.gz"
    with gzip.open(file, "rt") as stream:
        trace = json.load(stream)
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all({"name", "ts", "dur", "pid", "tid"} <= set(event) for event in events)
    phases = {event["name"]: event for event in events if event["pid"] == DRIVER_PID}
    assert set(phases) == {"step", "gen", "update_actor"}
    (train,) = (event for event in events if event["name"] == "actor: train")
    operators = [event for event in events if event["name"] == "aten::matmul"]
    assert operators
    # One clock: the rank's work lies within its phase, phases within the step, up to a millisecond.
    for inner, outer in (
        (train, phases["update_actor"]),
        (operators[0], phases["update_actor"]),
        (phases["gen"], phases["step"]),
    ):
        assert inner["ts"] >= outer["ts"] - 1000
        assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1000
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "process_name"}
    assert "phases of the step" in names


def test_other_steps_write_no_trace(tmp_path: Path) -> None:
    run_steps(tmp_path / "profile", steps=[])
    assert not (tmp_path / "profile").exists()


def test_phase_events_keep_nanoseconds() -> None:
    *_, event = phase_events([Span(name="a", start_s=1.5, end_s=1.75)], offset_ns=4_000_000_000_000_000_123)
    assert event["dur"] == 250_000
    assert event["ts"] == pytest.approx(4_000_000_000_000_000_123 / 1e3 + 1.5e6, abs=1)


@pytest.mark.parametrize("steps", [(0,), (4,)])
def test_profile_steps_outside_the_run_are_refused(steps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="profile_steps"):
        TrainerConfig(total_training_steps=3, profile_steps=steps)
