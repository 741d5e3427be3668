"""Two real ranks that tests share; closes the event loops of scripted clients after each test."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode leaves test folders off the path

from rl_runtime_client_loops import close_loops

from plinth_testing import RankPool, RankServer


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    script, folder = Path(__file__).with_name("rl_runtime_rank.py"), tmp_path_factory.mktemp("two_ranks")
    with RankServer(script, folder) as server, RankPool(server, 2, folder) as pool:
        yield pool


@pytest.fixture(scope="module")
def scorer() -> Iterator[Any]:
    """Scores with the default reward."""
    from rl_runtime.rollout.scoring import Scorer
    from rl_runtime.rollout.scoring_config import ScoringConfig

    with Scorer(ScoringConfig()) as made:
        yield made


@pytest.fixture(autouse=True)
def _client_loops() -> Iterator[None]:
    yield
    if close_loops():
        gc.collect()  # a loop that is still open is reported by the test that made it
        gc.freeze()  # what is left now is no longer searched, which takes seconds
