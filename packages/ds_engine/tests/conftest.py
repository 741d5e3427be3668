"""Fixtures: tiny model folders, and one, two or four real ranks (gloo, CPU)."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from plinth_testing import RankPool, RankServer, write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("untied_model"), tie_word_embeddings=False)


@pytest.fixture(scope="session")
def rank_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    script = Path(__file__).with_name("ds_engine_rank.py")
    with RankServer(script, tmp_path_factory.mktemp("rank_server")) as server:
        yield server


def pool_of(size: int, scope: str) -> object:
    @pytest.fixture(scope=scope)
    def pool(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
        with RankPool(rank_server, size, tmp_path_factory.mktemp(f"{size}_ranks")) as made:
            yield made

    return pool


two_ranks = pool_of(2, "session")
one_rank = pool_of(1, "module")
four_ranks = pool_of(4, "module")
