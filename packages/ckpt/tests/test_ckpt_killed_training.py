"""DeepSpeed training killed at random instants and resumed ends with the bits of an uninterrupted run."""

import json
from pathlib import Path
from typing import Any

import pytest
from ckpt_ranks import run_script

pytestmark = pytest.mark.slow


def kill(folder: Path, *, stage: int, num_kills: int) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(
        run_script("ckpt_killed_training.py", folder, stage, num_kills, timeout_s=560).splitlines()[-1]
    )
    print(f"stage {stage}: {report}")
    assert report["kills"] == num_kills
    assert report["steps"] > 3
    return report


@pytest.mark.long
def test_killed_a_few_times(tmp_path: Path) -> None:
    kill(tmp_path, stage=2, num_kills=3)


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_killed_a_hundred_times(tmp_path: Path, stage: int) -> None:
    report = kill(tmp_path, stage=stage, num_kills=100)
    assert report["before the first step"] > 5
    assert report["inside a save"] > 20
