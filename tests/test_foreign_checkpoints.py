"""Checkpoints of plain DeepSpeed load into our engine, and ours into plain DeepSpeed, bit for bit in fp32."""

from pathlib import Path

import pytest

import plinth_testing

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_zero_and_universal_checkpoints_in_both_directions(tmp_path: Path) -> None:
    script = Path(__file__).with_name("foreign_checkpoints.py")
    assert "all loaded" in plinth_testing.run_script(script, tmp_path, timeout_s=900)
