"""ServerWatch with scripted servers and with processes that exit immediately; no vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web
from rollout_vllm_helpers import AppThread, config_for_tests, make_requests

from plinth_testing import raises, wait_until
from rollout_vllm import (
    Endpoint,
    RolloutClient,
    RolloutConfigError,
    SamplingConfig,
    ScoringError,
    ServerDiedError,
    ServerGroup,
    ServerLostError,
    ServerStartError,
    ServerWatch,
    TokenScorer,
)
from rollout_vllm.servers.process import ServerProcess
from rollout_vllm.servers.watch import version_problem

NOBODY = Endpoint("http://127.0.0.1:9", "k", "policy")


class ScriptedServer:
    """A server that answers every request. While `loading` is set, `wait_ready` blocks until `stop` is called."""

    def __init__(self, tmp_path: Path, *routes: web.RouteDef) -> None:
        async def healthy(_: web.Request) -> web.Response:
            return web.Response()

        self._app = AppThread(web.get("/health", healthy), *routes)
        self.index, self.endpoint = 0, Endpoint(self._app.url, "k", "policy")
        self.log_path, self.alive = tmp_path / "log", True
        self.num_starts, self.loading = 0, False

    def start(self) -> None:
        self.num_starts += 1
        self.alive = True

    def wait_ready(self, deadline: float) -> None:
        while self.loading and time.monotonic() < deadline:
            if not self.alive:
                raise ServerStartError("it was stopped", self.index, self.log_path)
            time.sleep(0.01)

    def reason(self) -> str:
        return "it was stopped"

    def ask_to_stop(self) -> None: ...

    def stop(self) -> None:
        self.alive = False

    def release_port(self) -> None:
        self._app.close()


@pytest.fixture
def server(tmp_path: Path) -> ScriptedServer:
    return ScriptedServer(tmp_path)


def watched(
    server: ScriptedServer, on_restart: Callable[[int, Endpoint], int | None]
) -> tuple[ServerGroup, ServerWatch]:
    group = ServerGroup([server.endpoint], [server], 60.0)
    client = RolloutClient(group.endpoints, config_for_tests())
    client.set_policy_version(4)
    return group, ServerWatch(group, client, on_restart=on_restart)


def events(watch: ServerWatch) -> list[str]:
    return [event.kind for event in watch.events]


@pytest.mark.parametrize(
    ("returned", "expected"), [(4, ["died", "restarted"]), (None, ["died", "restarted"]), (3, ["died", "given_up"])]
)
def test_restart_requires_the_current_policy_version(
    server: ScriptedServer, returned: int | None, expected: list[str]
) -> None:
    group, watch = watched(server, lambda *_: returned)
    with group, watch:
        watch.restart(0)
        wait_until(lambda: len(watch.events) == 2, timeout_s=20)
    assert events(watch) == expected
    assert watch.events[0].detail == "it was stopped"
    assert ("version 3" in watch.events[1].detail) == (returned == 3) == bool(version_problem(returned, 4))


def test_on_restart_that_raises_gives_the_server_up(server: ScriptedServer) -> None:
    def fail(*_: object) -> int:
        raise ConnectionError("no weights")

    group, watch = watched(server, fail)
    with group, watch:
        watch.restart(0)
        wait_until(lambda: len(watch.events) == 2, timeout_s=20)
    assert watch.events[1].detail == "on_restart failed: ConnectionError: no weights"
    with raises(ServerDiedError, reason=watch.events[1].detail):
        watch.check()


def test_stop_aborts_a_restart(server: ScriptedServer) -> None:
    group, watch = watched(server, lambda *_: 4)
    server.loading = True
    with group:
        watch.start()
        watch.restart(0)
        wait_until(lambda: server.num_starts == 1, timeout_s=20)
        begin = time.monotonic()
        watch.stop(abort_restarts=True)
        assert time.monotonic() - begin < 20
        assert (events(watch), server.alive) == (["died"], False)


@pytest.mark.parametrize("max_restarts", [1, 0])
def test_a_scorer_repeats_what_a_dead_server_owed(tmp_path: Path, max_restarts: int) -> None:
    """A teacher has the weights of its folder, so that nothing is pushed to it."""

    async def score(request: web.Request) -> web.StreamResponse:
        if server.num_starts == 0:  # it dies of the request
            server.alive = False
            assert request.transport is not None
            request.transport.close()
        places = [{str(token): {"logprob": -float(token)}} for token in (await request.json())["prompt"]]
        return web.json_response({"choices": [{"prompt_logprobs": [None, *places[1:]]}]})

    server = ScriptedServer(tmp_path, web.post("/v1/completions", score))
    group = ServerGroup([server.endpoint], [server], 60.0)
    config = config_for_tests()
    with (
        TokenScorer(group.endpoints, config) as scorer,
        ServerWatch(group, scorer, on_restart=lambda *_: None, max_restarts=max_restarts) as watch,
    ):
        if max_restarts:
            scores = scorer.run(scorer.score([([1], [2, 3]), ([4], [5])]))
            assert [each.log_probs.tolist() for each in scores] == [[-2, -3], [-5]]
            assert events(watch) == ["died", "restarted"]
        else:
            with raises(ScoringError):
                scorer.run(scorer.score([([1], [2, 3])]))
            assert events(watch) == ["died", "given_up"]
            with raises(ServerDiedError, reason="it failed 1 times, max_restarts=0"):
                watch.check()


def test_server_that_cannot_start_is_given_up(tmp_path: Path) -> None:
    server = ServerProcess(0, NOBODY, ["--no-such-argument"], {"PYTHONHOME": str(tmp_path)}, tmp_path / "log")
    group = ServerGroup([NOBODY], [server], 60.0)
    client = RolloutClient([NOBODY], config_for_tests(max_retries=4))
    with client, ServerWatch(group, client, on_restart=lambda *_: 0, max_restarts=2) as watch:
        [result] = client.generate_blocking(make_requests(1), SamplingConfig(n=3, max_tokens=5))
        assert {f.kind for f in result.failures} == {"connection"}
        wait_until(lambda: "given_up" in events(watch))
        assert events(watch) == ["died", "died", "died", "given_up"]
        with raises(ServerDiedError, reason="it failed 3 times, max_restarts=2"):
            watch.check()
    with raises(RolloutConfigError, field="group"):
        ServerWatch(ServerGroup([NOBODY], [], 1.0), client, on_restart=lambda *_: 0)
    other = Endpoint("http://127.0.0.1:10", "k", "policy")
    with raises(RolloutConfigError, field="client"):
        ServerWatch(ServerGroup([other], [server], 1.0), client, on_restart=lambda *_: 0)


def test_a_server_whose_host_is_gone_is_given_up_at_once(server: ScriptedServer) -> None:
    def start() -> None:
        server.num_starts += 1
        raise ServerLostError("its Ray actor is gone", server.index, server.log_path)

    server.start = start  # type: ignore[method-assign]
    _, watch = watched(server, lambda *_: None)
    with watch:
        server.stop()
        wait_until(lambda: any(event.kind == "given_up" for event in watch.events), timeout_s=30)
        with raises(ServerDiedError, server_index=server.index):
            watch.check()
    assert [event.kind for event in watch.events] == ["died", "given_up"]
    assert server.num_starts == 1
