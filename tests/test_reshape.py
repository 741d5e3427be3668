"""Saved by 4 ranks, continued by 2, 1 and 8, across stages, offloads and dtypes, to the last bit.

CI leaves out the 8 ranks, for want of cores; PLINTH_RESHAPE_8=1 has them in.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


def test_every_layout_into_others(tmp_path: Path) -> None:
    """What is compared is in reshape_worlds.py, which ends with an error at the first bit that differs."""
    sizes = ["8"] if os.environ.get("PLINTH_RESHAPE_8") else []
    script = Path(__file__).with_name("reshape_worlds.py")
    log = tmp_path / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), *sizes],
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=500)
        finally:
            with contextlib.suppress(ProcessLookupError):  # the ranks too, whatever became of their parent
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_text(errors="replace")
    assert code == 0, text[-6000:]
    for size in ("4", "2", "1", *sizes):
        assert f"{size} ranks: done" in text
