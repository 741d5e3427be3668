"""A server owned by an actor of a real Ray cluster: one node with a custom resource for servers."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from rollout_vllm_helpers import assert_complete, config_for_tests, make_requests

from plinth_base.endpoint import call
from plinth_testing import raises, wait_until
from rollout_vllm import (
    Endpoint,
    ModelFolderError,
    RolloutClient,
    RolloutConfig,
    RolloutConfigError,
    SamplingConfig,
    ServerDiedError,
    ServerLostError,
    ServerSeat,
    launch_on_ray,
)

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
ray: Any = pytest.importorskip("ray")
NodeAffinitySchedulingStrategy: Any = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    for attempt in range(3):
        try:
            ray.init(
                address="local",
                num_cpus=2,
                resources={"rollout_node": 1},
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=128 << 20,
                _system_config={"worker_niceness": 0},
            )
            break
        except Exception:  # on a busy machine, Ray's processes do not start within half a minute
            ray.shutdown()
            if attempt == 2:
                raise
    signal.signal(signal.SIGTERM, handler)
    yield
    ray.shutdown()


def test_invalid_launches_are_rejected_immediately(model_folder: Path, tmp_path: Path) -> None:
    with raises(RolloutConfigError, remedy="call ray.init(address=...) first"):
        launch_on_ray(model_folder, config_for_tests(), log_dir=tmp_path)
    with raises(RolloutConfigError, field="urls"):
        launch_on_ray(model_folder, RolloutConfig(urls=("http://a:1",)), log_dir=tmp_path)


def processes_of(log_path: Path) -> list[int]:
    """All processes that write to this log: the supervisor and its descendants."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if any(Path(os.readlink(fd)) == log_path for fd in (folder / "fd").iterdir()):
                pids.append(int(folder.name))
        except OSError:
            continue
    return pids


def test_server_on_a_ray_node(cluster: None, model_folder: Path, tmp_path: Path) -> None:
    config = config_for_tests(startup_timeout_s=400.0)
    wanted = {"CPU": 1, "rollout_node": 1}
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    seat = ServerSeat(strategy=here)
    with raises(RolloutConfigError, field="seats"):
        launch_on_ray(model_folder, config, log_dir=tmp_path, seats=[seat, seat])
    with raises(RolloutConfigError, field="num_servers", value=2):
        launch_on_ray(model_folder, config_for_tests(num_servers=2), log_dir=tmp_path, resources_per_server=wanted)
    with raises(ModelFolderError, value=str(tmp_path / "nowhere")) as caught:
        launch_on_ray(tmp_path / "nowhere", config, log_dir=tmp_path)
    assert caught.value.problem.startswith("on Ray node ")
    nodes: dict[str, Any] = {"seats": [seat], "resources_per_server": wanted}
    with launch_on_ray(model_folder, config, log_dir=tmp_path, **nodes) as group:
        [server], [endpoint] = group.servers, group.endpoints
        assert ray.available_resources().get("rollout_node", 0) == 0  # the server holds its resources
        group.wait_ready()
        address = urlsplit(endpoint.url).hostname
        assert address == ray.util.get_node_ip_address()
        with pytest.raises(ConnectionRefusedError):  # bound only to the node's cluster address
            call(Endpoint(endpoint.url.replace(str(address), "127.0.0.2")), "GET", "/health")
        assert call(Endpoint(endpoint.url, "wrong"), "POST", "/v1/completions", {})[0] == 401
        requests = make_requests(6)
        with RolloutClient(group.endpoints, config) as client:
            groups = client.generate_blocking(requests, SamplingConfig(n=2, max_tokens=6))
        assert_complete(requests, groups, 2)
        assert all(g.complete for g in groups)
        group.check()

        server.stop()
        assert not server.alive
        wait_until(lambda: not processes_of(server.log_path), timeout_s=60)
        with raises(ServerDiedError, reason="it was stopped"):
            group.check()
        server.start()  # as ServerWatch does, on the same node and port
        assert server.alive
        wait_until(lambda: len(processes_of(server.log_path)) > 1)
        ray.kill(server._actor)  # type: ignore[attr-defined]  # as if its node were lost
        wait_until(lambda: not server.alive)
        assert "actor is gone" in server.reason()
        with raises(ServerLostError, server_index=0):
            server.start()
        with raises(ServerLostError, server_index=0):
            group.wait_ready()
        wait_until(lambda: not processes_of(server.log_path), timeout_s=60)
