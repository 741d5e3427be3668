"""Policy versions noted by the servers: when they learn of one, how it is read, and servers that do not note any."""

import asyncio
import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_vllm_helpers import AppThread, FaultyProxy, config_for_tests

from rollout_vllm import ControlError, Endpoint, RolloutClient, ServerGroup, UnlabeledTokensError
from rollout_vllm.client.protocol import MalformedAnswerError, parse_completion
from rollout_vllm.servers.policy_versions import PUBLISH, ROUTE, PolicyVersionMiddleware, version_in

QUICK = settings(deadline=None, derandomize=True)
FINISH = "/finish_weight_update"


class Enabled(PolicyVersionMiddleware):
    enabled = True


class FakeServer:
    """vLLM's app behind the middleware, and its engine core. events: what happened, in order."""

    def __init__(self, middleware: type[PolicyVersionMiddleware] = Enabled, status: int = 200) -> None:
        self.events: list[Any] = []
        self._middleware, self._status, self._version = middleware, status, -1
        self.state = SimpleNamespace(engine_client=SimpleNamespace(engine_core=self))

    async def call_utility_async(self, method: str, version: int | None) -> int:
        assert method == PUBLISH
        if version is not None:
            self.events.append(version)
            self._version = version
        return self._version

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.events.append(body)
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.start", "status": self._status})
        await send({"type": "http.response.body", "body": b"own"})

    def request(self, method: str, path: str, *parts: bytes) -> bytes:
        """The body of the answer."""
        messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        messages += [{"type": "http.request"}, {"type": "http.disconnect"}]
        answer = bytearray()

        async def receive() -> Any:
            return messages.pop(0)

        async def send(message: Any) -> None:
            self.events.append(message["type"])
            answer.extend(message.get("body", b""))

        scope = {"type": "http", "method": method, "path": path, "app": self}
        asyncio.run(self._middleware(self._app)(scope, receive, send))
        return bytes(answer)


ANSWERED = ["http.response.start", "http.response.body"]


def test_version_is_published_after_the_update_and_before_its_answer() -> None:
    server = FakeServer()
    assert json.loads(server.request("GET", ROUTE)) == {"policy_version": -1}
    server.events.clear()
    body = json.dumps({"weight_version": "7"}).encode()
    assert server.request("POST", FINISH, body[:5], body[5:]) == b"own"
    assert server.events == [body, 7, *ANSWERED]
    assert json.loads(server.request("GET", ROUTE)) == {"policy_version": 7}
    server.request("POST", FINISH)  # an update without a version
    assert json.loads(server.request("GET", ROUTE)) == {"policy_version": -1}


@pytest.mark.parametrize(
    ("method", "path", "options"),
    [
        ("POST", FINISH, {"status": 500}),
        ("POST", FINISH, {"middleware": PolicyVersionMiddleware}),
        ("GET", ROUTE, {"middleware": PolicyVersionMiddleware}),
        ("POST", "/v1/completions", {}),
        ("GET", FINISH, {}),
    ],
)
def test_nothing_else_publishes_a_version(method: str, path: str, options: dict[str, Any]) -> None:
    server = FakeServer(**options)
    assert server.request(method, path, b'{"weight_version": "7"}') == b"own"
    assert server.events == [b'{"weight_version": "7"}', *ANSWERED]


@pytest.mark.parametrize(
    ("body", "version"),
    [
        (b'{"weight_version": "12"}', 12),
        (b'{"weight_version": 0}', 0),
        (b'{"weight_version": "default"}', None),
        (b'{"weight_version": -1}', None),
        (b'{"weight_version": 1.5}', None),
        (b'{"weight_version": true}', None),
        (b'{"weight_version": null}', None),
        (b"{}", None),
        (b"[]", None),
        (b"7", None),
        (b"", None),
        (b"\xff", None),
        (b"[" * 100_000, None),
    ],
)
def test_version_in_a_finished_update(body: bytes, version: int | None) -> None:
    assert version_in(body) == version


def answer(spans: Any, num_tokens: int) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop", "token_ids": [5] * num_tokens, "policy_versions": spans}
    return {"choices": [choice | {"logprobs": {"token_logprobs": [-1.0] * num_tokens}}]}


@QUICK
@given(st.lists(st.tuples(st.integers(-1, 9), st.integers(1, 40)), max_size=6), st.booleans())
def test_spans_of_an_answer_cover_its_tokens(spans: list[tuple[int, int]], log_probs: bool) -> None:
    num_tokens = sum(count for _, count in spans)
    body = json.loads(json.dumps(answer(spans, num_tokens)))
    [choice] = parse_completion(body, 1, log_probs=log_probs)
    assert choice.spans == tuple((None if version == -1 else version, count) for version, count in spans)
    for wrong in (num_tokens + 1, max(0, num_tokens - 1)):
        if spans and wrong != num_tokens:
            with pytest.raises(MalformedAnswerError):
                parse_completion(answer(spans, wrong), 1)


@pytest.mark.parametrize(
    "spans", [None, 3, [[1]], [[1, 2, 3]], [["a", 2]], [[1, 3], [2, -1]], [[1, 2], [2, 0]], {"1": 2}, [[1, True]], "ab"]
)
def test_other_spans_are_rejected(spans: Any) -> None:
    with pytest.raises(MalformedAnswerError):
        parse_completion(answer(spans, 2), 1)


def test_versions_of_the_servers() -> None:
    numbers = itertools.count(3)

    async def version(_: web.Request) -> web.Response:
        return web.json_response({"policy_version": next(numbers)})

    async def junk(_: web.Request) -> web.Response:
        return web.json_response([1])

    apps = [AppThread(web.get(ROUTE, version)), AppThread(web.get(ROUTE, junk)), AppThread()]
    good, bad, old = (Endpoint(app.url, "k", "m") for app in apps)
    with RolloutClient([good, good], config_for_tests()) as client:
        assert sorted(client.run(client.fetch_policy_versions()), key=str) == [3, 4]
    gone = Endpoint("http://127.0.0.1:9", "k", "m")
    with RolloutClient([good, bad, old, gone], config_for_tests()) as client:
        with pytest.raises(UnlabeledTokensError) as caught:
            client.run(client.fetch_policy_versions())
        with pytest.raises(ControlError) as unknown:
            client.run(client.fetch_policy_versions([0, 1, 3]))
    assert not isinstance(unknown.value, UnlabeledTokensError), "these may note versions"
    assert set(unknown.value.problems) == {bad.url, gone.url}
    assert set(caught.value.problems) == {bad.url, old.url, gone.url}
    assert "does not note the policy version of tokens; start it with ServerGroup" in caught.value.problems[old.url]
    for app in apps:
        app.close()


@pytest.mark.slow
def test_launched_servers_note_versions(pair: ServerGroup, client: RolloutClient, proxy: FaultyProxy) -> None:
    assert client.run(client.fetch_policy_versions()) == [None, None]  # no weights were pushed
    proxy.without_control_routes = True
    with RolloutClient([proxy.endpoint], config_for_tests()) as other, pytest.raises(UnlabeledTokensError):
        other.run(other.fetch_policy_versions())
