"""What the README and the example say they do, they do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from plinth_testing import free_port

PACKAGE = Path(__file__).parents[1]
ENV = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_readme_trains_a_model(tiny_model: Path) -> None:
    code = re.search(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.S)
    assert code is not None
    program = code[1].replace("path/to/model", str(tiny_model)).replace("29511", str(free_port()))
    result = subprocess.run([sys.executable, "-c", program], env=ENV, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    losses = [float(line.split()[0]) for line in result.stdout.splitlines() if re.fullmatch(r"[\d.]+ [\d.]+", line)]
    assert len(losses) == 3
    assert losses[2] < losses[0]


@pytest.mark.slow
def test_guard_in_a_plain_fsdp_script() -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())),
        *(str(PACKAGE / "examples" / "fsdp_with_guard.py"), "--break"),
    ]
    result = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=200)
    assert result.returncode != 0
    assert "rank 0 step 2" in result.stdout
    for rank in range(2):
        assert f"collective guard, rank {rank}: ranks diverge" in result.stderr
    assert "rank 1 called all_reduce of 1 float32 at" in result.stderr
    assert "during step 3" in result.stderr
