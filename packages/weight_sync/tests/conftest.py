"""Fixtures: two tiny models of one architecture and one real server, shared by all tests of the package."""

import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import weight_sync_helpers as helpers
from torch._C._distributed_c10d import TCPStore

from weight_sync.channel import Channel


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


@pytest.fixture
def rendezvous() -> Iterator[tuple[TCPStore, list[Channel], list[Channel]]]:
    """A store, and the pusher's and the workers' ends of two channels."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    pairs = [socket.socketpair() for _ in range(2)]
    pushers, workers = ([Channel(pair[side], 5.0) for pair in pairs] for side in range(2))
    yield store, pushers, workers
    for channel in [*pushers, *workers]:
        channel.close()
