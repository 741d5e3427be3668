"""DeepSpeed training killed at random instants and resumed ends with the bits of an uninterrupted run."""

import json
from pathlib import Path

import pytest
from ckpt_ranks import run_script

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("stage", "num_kills"),
    [
        pytest.param(2, 3, marks=pytest.mark.long),
        *(pytest.param(stage, 30, marks=pytest.mark.thorough) for stage in (1, 2, 3)),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(stage: int, num_kills: int, tmp_path: Path) -> None:
    report = json.loads(
        run_script("ckpt_killed_training.py", tmp_path, stage, num_kills, timeout_s=560).splitlines()[-1]
    )
    print(f"stage {stage}: {report}")
    assert report["kills"] == num_kills
    assert report["steps"] > 3
    if num_kills == 30:
        assert report["before the first step"] > 1
        assert report["inside a save"] > 5
