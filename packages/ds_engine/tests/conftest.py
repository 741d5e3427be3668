"""Fixtures: tiny model folders, and one, two or four real ranks (gloo, CPU)."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ds_engine_libaio import compiler_without_debug_symbols, libaio_variables, small_torch_header

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


@pytest.fixture(scope="module")
def nvme_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Two ranks that can build DeepSpeed's asynchronous I/O, which takes minutes of a C++ compiler."""
    folder = tmp_path_factory.mktemp("libaio")
    variables = libaio_variables(folder)
    if variables is None:
        pytest.skip("libaio is not installed, and apt-get cannot download libaio-dev")
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {**variables, "TORCH_EXTENSIONS_DIR": str(folder / "extensions")}.items():
            environment.setenv(name, value)
        environment.setenv("CPATH", str(small_torch_header(folder / "include")), prepend=":")
        from deepspeed.ops.op_builder import AsyncIOBuilder

        if not AsyncIOBuilder().is_compatible(verbose=False):
            pytest.skip("there is no C++ compiler, or it cannot link libaio")
        environment.setenv("CXX", compiler_without_debug_symbols(folder / "bin"))
        script = Path(__file__).with_name("ds_engine_rank.py")
        with RankServer(script, folder) as server, RankPool(server, 2, folder, timeout_s=1500) as pool:
            yield pool


def pool_of(size: int, scope: str) -> object:
    @pytest.fixture(scope=scope)
    def pool(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
        with RankPool(rank_server, size, tmp_path_factory.mktemp(f"{size}_ranks")) as made:
            yield made

    return pool


two_ranks = pool_of(2, "session")
one_rank = pool_of(1, "module")
four_ranks = pool_of(4, "module")
