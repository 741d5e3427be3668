"""Closes the event loops of scripted clients after each test."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode leaves test folders off the path

from rl_runtime_client_loops import close_loops


@pytest.fixture(autouse=True)
def _client_loops() -> Iterator[None]:
    yield
    if close_loops():
        gc.collect()  # a loop that is still open is reported by the test that made it
        gc.freeze()  # what is left now is no longer searched, which takes seconds
