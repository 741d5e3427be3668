"""Checkpoints of 4 ranks are continued by 2, 1 and 8, across stages, offloads and dtypes, bit for bit.

8 ranks run only with PLINTH_RESHAPE_8=1: CI has too few cores for them.
"""

import os
from pathlib import Path

import pytest

import plinth_testing

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


def test_every_layout_into_others(tmp_path: Path) -> None:
    """reshape_worlds.py compares, and ends with an error at the first bit that differs."""
    sizes = ["8"] if os.environ.get("PLINTH_RESHAPE_8") else []
    text = plinth_testing.run_script(Path(__file__).with_name("reshape_worlds.py"), tmp_path, *sizes, timeout_s=500)
    for size in ("4", "2", "1", *sizes):
        assert f"{size} ranks: done" in text
