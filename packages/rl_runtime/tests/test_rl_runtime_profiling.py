import gzip
import json
from pathlib import Path

import pytest
import torch

from plinth_base.errors import PlinthError
from plinth_testing import raises
from rl_runtime.config import TrainerConfig
from rl_runtime.ranks.trainer_worker import RankProfiler
from run_kit.profiling import StepProfiler
from run_kit.timing import PhaseTimer


def train() -> None:
    with torch.profiler.record_function("actor: train"):
        weight = torch.ones(32, 32, requires_grad=True)
        (weight @ weight).sum().backward()


class OneRank:
    """A recorder of this process."""

    def __init__(self) -> None:
        self.profiler = RankProfiler()
        self.start = self.profiler.start_profile

    def stop(self, folder: Path) -> None:
        self.profiler.stop_profile(str(folder / "rank.json.gz"))


@pytest.mark.parametrize("steps", [[2], []])
def test_a_traced_step_has_a_trace_of_each_process_and_others_none(tmp_path: Path, steps: list[int]) -> None:
    profiler = StepProfiler(OneRank(), tmp_path / "profile", steps)
    for step in (1, 2, 3):
        timer = PhaseTimer()
        with profiler.step(step), timer.step():
            train()
    files = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.gz")]
    assert files == [f"profile/step_{step:06d}/rank.json.gz" for step in steps]
    for file in files:
        with gzip.open(tmp_path / file, "rt") as stream:
            names = {event.get("name") for event in json.load(stream)["traceEvents"]}
        assert {"actor: train", "aten::matmul"} <= names


@pytest.mark.parametrize("steps", [(0,), (4,)])
def test_profile_steps_outside_the_run_are_refused(steps: tuple[int, ...]) -> None:
    with raises(PlinthError, field="profile_steps"):
        TrainerConfig(total_training_steps=3, profile_steps=steps)
