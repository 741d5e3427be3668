"""The order in which the processes of a run start, and that all of them end."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_runtime.config import TrainerConfig
from rl_runtime.launch import session
from rl_runtime.launch.placement import Placement, Slot
from rollout_vllm import RolloutConfig
from weight_sync import SyncConfig


@pytest.mark.parametrize(
    ("gpus", "address", "first"),
    [((0,), None, "servers"), ((), None, "ray"), ((0,), "10.0.0.1:6379", "ray")],
)
@pytest.mark.parametrize("ranks_fail", [False, True])
def test_servers_start_before_ray_on_the_gpus_of_this_host(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    gpus: tuple[int, ...],
    address: str | None,
    first: str,
    ranks_fail: bool,
) -> None:
    events: list[str] = []

    @contextmanager
    def running(name: str, value: Any = None) -> Iterator[Any]:
        events.append(name)
        try:
            yield value
        finally:
            events.append(f"end of {name}")

    reservation = None if address is None else object()
    given: list[object] = []
    servers = SimpleNamespace(servers=(), endpoints=())

    def launch(*arguments: Any) -> Any:
        given.append(arguments[-1])
        return running("servers", servers)

    def start_ranks(self: session.Session) -> None:
        events.append("ranks")
        if ranks_fail:
            raise RuntimeError("no ranks")

    monkeypatch.setattr(session, "_servers", launch)
    monkeypatch.setattr(session, "_ray", lambda *_: running("ray", SimpleNamespace(reservation=reservation)))
    monkeypatch.setattr(session.Session, "start_ranks", start_ranks)
    placement = Placement(ranks=(Slot(gpus=gpus),), servers=(Slot(gpus=gpus),))
    trainer, rollout, sync = TrainerConfig(ray_address=address), RolloutConfig(), SyncConfig()
    try:
        with session.open_session(
            placement, trainer=trainer, rollout=rollout, model_path="", log_dir=tmp_path, sync=sync
        ) as opened:
            assert opened.servers is servers  # type: ignore[comparison-overlap]
    except RuntimeError:
        assert ranks_fail
    second = "ray" if first == "servers" else "servers"
    assert events == [first, second, "ranks", f"end of {second}", f"end of {first}"]
    assert given == [reservation]
