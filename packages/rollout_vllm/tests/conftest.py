"""Fixtures: a tiny random model, one pair of real servers per session, a client, a faulty proxy."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode leaves test folders off the path

from rollout_vllm_helpers import FaultyProxy, build_model, config_for_tests

from rollout_vllm import RolloutClient, ServerGroup


def pytest_configure() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    build_model(folder / "model", folder / "adapter")
    return folder


@pytest.fixture(scope="session")
def model_folder(built: Path) -> Path:
    return built / "model"


@pytest.fixture(scope="session")
def adapter_folder(built: Path) -> Path:
    return built / "adapter"


@pytest.fixture(scope="session")
def pair(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerGroup]:
    """Two servers. A test that kills one restarts it."""
    config = config_for_tests(num_servers=2, max_lora_rank=8, control_routes=True)
    with ServerGroup.launch(model_folder, config, log_dir=tmp_path_factory.mktemp("logs")) as group:
        group.wait_ready()
        yield group


@pytest.fixture
def client(pair: ServerGroup) -> Iterator[RolloutClient]:
    with RolloutClient(pair.endpoints, config_for_tests()) as made:
        yield made


@pytest.fixture
def proxy(pair: ServerGroup) -> Iterator[FaultyProxy]:
    made = FaultyProxy(pair.endpoints[0])
    yield made
    made.close()
