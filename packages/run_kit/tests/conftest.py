import sys
from pathlib import Path

import pytest

from run_kit import RunFolder

sys.path.insert(0, str(Path(__file__).parent))  # run_kit_testkit


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "x")
