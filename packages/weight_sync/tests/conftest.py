"""Fixtures: two tiny models of one architecture and one real server, shared by all tests of the package."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import weight_sync_helpers as helpers


@pytest.fixture(autouse=True)
def skip_for_missing_routes() -> Iterator[None]:
    """Questions that this vLLM cannot answer are reported as skipped; the rest of the test has run."""
    helpers.UNASKED.clear()
    yield
    if helpers.UNASKED:
        pytest.skip("; ".join(helpers.UNASKED))


@pytest.fixture(scope="session")
def old_model() -> Any:
    """The model that the server is started with."""
    return helpers.tiny_model(seed=1)


@pytest.fixture(scope="session")
def new_model() -> Any:
    """Same architecture, different weights."""
    return helpers.tiny_model(seed=2)


@pytest.fixture(scope="session")
def server(old_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[helpers.Server]:
    """A Qwen3 server with tied embeddings and an API key."""
    folder = tmp_path_factory.mktemp("weight_sync_server")
    helpers.save_model(old_model, folder / "model")
    with helpers.running_server(folder / "model", folder / "server.log", api_key="secret") as running:
        yield running
