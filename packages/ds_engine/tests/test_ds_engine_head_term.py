"""A term of the loss that needs the LM head, and a frozen teacher's hidden states and head, against plain PyTorch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from plinth_testing import write_tiny_model


@pytest.mark.slow
@pytest.mark.thorough
def test_the_divergence_to_a_teacher_trains_as_plain_pytorch_does(tmp_path: Path) -> None:
    """Two ranks, stages 2 and 3, with and without sequence parallelism, one rank with an empty micro batch."""
    folders = [
        write_tiny_model(tmp_path / "student", tie_word_embeddings=False),
        write_tiny_model(tmp_path / "teacher", seed=1, hidden_size=48, tie_word_embeddings=False),
    ]
    script = Path(__file__).with_name("ds_engine_head_term_worker.py")
    command = [sys.executable, str(script), *map(str, folders)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
