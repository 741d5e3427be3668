"""The examples, killed and resumed, end like an uninterrupted run."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager, load_state_dict

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

pytestmark = pytest.mark.slow


def run(name: str, *arguments: object) -> str:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.thorough
def test_plain_torch_killed_and_resumed_ends_with_the_same_bits(tmp_path: Path) -> None:
    options = ["--steps", 60, "--save-every", 5]
    whole = run("plain_torch.py", tmp_path / "whole", *options)
    command = [sys.executable, str(EXAMPLES / "plain_torch.py"), str(tmp_path / "killed"), "--steps", "1000000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += ["--save-every", "5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 15"):
                break
        time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    manager = CheckpointManager(tmp_path / "killed" / "checkpoints")
    manager.discard_after(59)  # it may have come further than the other run
    manager.close()
    resumed = run("plain_torch.py", tmp_path / "killed", *options)
    assert "resumed after step" in resumed
    checksum = re.compile(r"weights [0-9a-f]{16}")
    assert checksum.findall(resumed) == checksum.findall(whole) != []


@pytest.mark.thorough
def test_fsdp2_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    run("fsdp2.py", tmp_path / "whole", "--ranks", 1, "--steps", 4)
    run("fsdp2.py", tmp_path / "moved", "--ranks", 2, "--steps", 2)
    assert run("fsdp2.py", tmp_path / "moved", "--ranks", 1, "--steps", 4).startswith("step 3: ")
    states = [
        load_state_dict(CheckpointManager(tmp_path / name / "checkpoints").load(4).path / "train.safetensors")
        for name in ("whole", "moved")
    ]
    assert states[0]["model"].keys() == states[1]["model"].keys() != set()
    for name, weight in states[0]["model"].items():
        torch.testing.assert_close(weight, states[1]["model"][name], rtol=1e-5, atol=1e-6)
