import gzip
import json
from pathlib import Path

import pytest
import torch

from rl_runtime.config import TrainerConfig
from rl_runtime.ranks.trainer_worker import RankProfiler
from run_kit.profiling import DRIVER_PID, StepProfiler, merge_traces, phase_events
from run_kit.timing import PhaseTimer, Span


def train() -> None:
    with torch.profiler.record_function("actor: train"):
        weight = torch.ones(32, 32, requires_grad=True)
        (weight @ weight).sum().backward()


class OneRank:
    """A recorder of this process."""

    def __init__(self) -> None:
        self.profiler = RankProfiler()
        self.start = self.profiler.start_profile

    def stop(self, folder: Path) -> dict[str, Path]:
        self.profiler.stop_profile(str(folder / "rank.json.gz"))
        return {"rank 0": folder / "rank.json.gz"}


def run_steps(folder: Path, *, steps: list[int]) -> None:
    profiler = StepProfiler([OneRank()], folder, steps)
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
    assert {"phases of the step", "rank 0"} <= names


def write_trace(path: Path, *, base_ns: int, ts: float) -> None:
    """A trace as torch writes it: a process, its GPU 0, and a flow from one to the other."""
    process = {"name": "process_name", "ph": "M", "ts": ts, "pid": 77, "tid": 0, "args": {"name": "python"}}
    work = {"ph": "X", "name": f"kernel {path.stem}", "pid": 0, "tid": 7, "ts": ts, "dur": 5.0, "args": {"id": 3}}
    flow = {"ph": "s", "id": 4, "pid": 77, "tid": 0, "ts": ts, "cat": "ac2g", "name": "ac2g"}
    trace = {"schemaVersion": 1, "traceEvents": [process, work, flow], "baseTimeNanoseconds": base_ns}
    with gzip.open(path, "wt") as file:
        json.dump(trace | {"traceName": "x]"}, file, indent=1)


@pytest.mark.parametrize("shift_ns", [0, 2_000_000])
def test_traces_of_several_processes_share_a_clock_and_no_ids(tmp_path: Path, shift_ns: int) -> None:
    """The second process counts its times from another base, and both use GPU 0 and flow 4."""
    write_trace(tmp_path / "a.gz", base_ns=10**18, ts=100.5)
    write_trace(tmp_path / "b.gz", base_ns=10**18 + shift_ns, ts=100.5 - shift_ns / 1e3)
    spans = [Span(name="gen", start_s=1.0, end_s=2.0)]
    traces = {"rank 0": tmp_path / "a.gz", 'server "engine"': tmp_path / "b.gz"}
    merge_traces(tmp_path / "all.gz", traces, spans, epoch_ns=10**18)
    with gzip.open(tmp_path / "all.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    kernels = [event for event in events if event["name"].startswith("kernel")]
    assert [event["ts"] for event in kernels] == pytest.approx([100.5, 100.5])
    assert len({event["pid"] for event in kernels}) == 2
    assert len({event["id"] for event in events if event["ph"] == "s"}) == 2
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["phases of the step", "rank 0", 'server "engine"']
    (gen,) = (event for event in events if event["name"] == "gen")
    assert (gen["ts"], gen["dur"]) == (1e6, 1e6)


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
