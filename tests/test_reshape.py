"""Checkpoints of 4 ranks are continued by 2 and 1, across stages, offloads and dtypes, bit for bit."""

from pathlib import Path

import pytest

import plinth_testing

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


def test_every_layout_is_continued_by_the_others_bit_for_bit(tmp_path: Path) -> None:
    """reshape_worlds.py compares, and ends with an error at the first bit that differs."""
    text = plinth_testing.run_script(Path(__file__).with_name("reshape_worlds.py"), tmp_path, timeout_s=500)
    assert all(f"{size} ranks: done" in text for size in (4, 2, 1))
