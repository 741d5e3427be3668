"""Distribution of the tests over pytest-xdist workers."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import pytest

def test_unit(): pass

@pytest.mark.slow
@pytest.mark.parametrize("i", range(4))
def test_real(i): pass
"""


def test_a_folders_real_processes_stay_on_one_worker(tmp_path: Path) -> None:
    """pytest-xdist has silently stopped doing so with another version of pytest."""
    pytest.importorskip("xdist")
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n")
    (tmp_path / "test_a.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-v", "-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    workers = {line.split()[0] for line in run.stdout.splitlines() if "PASSED" in line and "test_real" in line}
    assert len(workers) == 1, run.stdout
    assert "5 passed" in run.stdout
