"""The command line of an app: what happens between the configuration and the app."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rl_runtime.app import cli
from rl_runtime.job_config import JobConfig
from rl_runtime.launch import local_ray
from rl_runtime.ranks import environment

CPU = ["trainer.device=cpu"]


@pytest.mark.parametrize(
    ("gpus", "arguments", "expected"),
    [
        (0, [], [("cpu", 1)]),
        (0, ["rollout.num_servers=2"], [("cpu", 2)]),
        (4, [], [("cuda", 4)]),
        (4, ["rollout.tensor_parallel_size=2"], [("cuda", 2)]),
        (4, ["rollout.num_servers=1"], [("cuda", 1)]),
        (4, CPU, [("cpu", 1)]),
        (4, ["trainer.ray_address=10.0.0.1:6379"], []),  # the servers are on other hosts
        (4, ["rollout.urls=[http://10.0.0.1:8000]", "rollout.api_key=k"], []),
    ],
)
def test_processes_of_the_servers_and_ray_start_before_the_app(
    gpus: int, arguments: list[str], expected: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    events, imported = list[object](), threading.Event()

    def fails(name: str) -> None:
        imported.set()
        raise ImportError(name)  # the app meets it again

    @contextmanager
    def start_ray(num_cpus: int) -> Iterator[None]:
        events.append(f"Ray for {num_cpus} ranks")
        assert imported.wait(30), "the app's modules are imported meanwhile"
        yield

    @contextmanager
    def prepare(_: object, *, device: str, number: int, env: Any) -> Iterator[None]:
        events.append((device, number))
        yield
        events.append("ended")

    monkeypatch.setattr(cli, "prepare_imports", lambda: events.append("variables"))
    monkeypatch.setattr(cli, "prepare_servers", prepare)
    monkeypatch.setattr(cli, "listed_gpus", lambda: gpus)
    monkeypatch.setattr(cli, "import_module", fails)
    monkeypatch.setattr(local_ray, "ray_ahead", start_ray)
    argv = ["model.path=m", "data.train=[d]", *arguments]
    with pytest.raises(SystemExit) as ended:
        cli.run_job_cli(JobConfig, lambda _: events.append("app"), argv)
    assert ended.value.code == 0
    on_gpus = gpus and not {"trainer.device=cpu", "trainer.ray_address=10.0.0.1:6379"} & set(arguments)
    ray = [f"Ray for {gpus} ranks"] if on_gpus else []
    assert events == ["variables", *expected, *ray, "app", *(["ended"] if expected else [])]


def test_gpus_are_counted_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda *_: iter(["nvidia0", "nvidia1", "nvidia2"]))
    for listed, number in (("0,1", 2), ("", 0), ("-1", 0), ("0,1,2,3", 3), ("GPU-5,MIG-7", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        assert environment.listed_gpus() == number
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert environment.listed_gpus() == 3
