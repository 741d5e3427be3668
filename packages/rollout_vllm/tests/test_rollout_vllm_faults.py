"""Network faults and dying servers, with real vLLM: every sample is returned once and no process is left."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rollout_vllm_helpers import FaultyProxy, assert_complete, config_for_tests, make_requests

import rollout_vllm.client.transport
from plinth_testing import wait_until
from rollout_vllm import Endpoint, Group, RolloutClient, RolloutConfig, SamplingConfig, ServerGroup, ServerWatch

pytestmark = [pytest.mark.slow, pytest.mark.long]  # two servers
SHORT = SamplingConfig(n=3, max_tokens=5)


def quick(**changes: object) -> RolloutConfig:
    return config_for_tests(**({"max_retries": 4} | changes))


def test_transient_faults_lose_no_sample(proxy: FaultyProxy) -> None:
    proxy.plan.extend(["drop", "cut", "garbage", "missing", 500, 503, 429, "pass", "drop", "garbage"])
    proxy.retry_after = "0.1"
    requests = make_requests(8)
    with RolloutClient([proxy.endpoint], quick()) as client:
        groups = client.generate_blocking(requests, SHORT)
        assert client.counters.num_retries == 9
    assert_complete(requests, groups, 3)
    assert all(g.complete for g in groups)
    assert proxy.num_requests == 17
    assert max(s.num_attempts for g in groups for s in g.samples) > 1


@pytest.mark.parametrize(
    ("fault", "kind", "attempts"),
    [
        *(("garbage", "malformed", 3), ("missing", "malformed", 3), ("drop", "connection", 3)),
        *((503, "server", 3), (422, "refused", 1)),
    ],
)
def test_permanent_faults_are_reported_for_each_sample(
    proxy: FaultyProxy, fault: str | int, kind: str, attempts: int
) -> None:
    proxy.plan.extend([fault] * 3)
    [request] = make_requests(1)
    with RolloutClient([proxy.endpoint], quick(max_retries=2)) as client:
        groups = client.generate_blocking([request], SHORT)
    assert_complete([request], groups, 3)
    assert not groups[0].samples
    assert {(f.kind, f.num_attempts) for f in groups[0].failures} == {(kind, attempts)}
    assert proxy.num_requests == attempts


def test_request_that_hangs_is_retried_on_another_server(proxy: FaultyProxy, pair: ServerGroup) -> None:
    proxy.plan.append("hang")
    requests = make_requests(2)
    with RolloutClient([proxy.endpoint, pair.endpoints[1]], quick(request_timeout_s=3.0)) as client:
        groups = client.generate_blocking(requests, SHORT)
    assert_complete(requests, groups, 3)
    assert all(g.complete for g in groups)
    assert groups[0].samples[0].server_url == pair.endpoints[1].url  # not the one that hung


def test_stale_connection_is_replaced(pair: ServerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn closes idle connections after 5 s; in this test the client keeps them longer."""
    monkeypatch.setattr(rollout_vllm.client.transport, "_KEEP_ALIVE_S", 60.0)
    requests = make_requests(8)
    with RolloutClient(pair.endpoints, quick()) as client:
        assert all(g.complete for g in client.generate_blocking(requests, SHORT))
        time.sleep(5.5)
        assert all(g.complete for g in client.generate_blocking(requests, SHORT))


def test_cancelling_generate_aborts_the_requests_on_the_servers(pair: ServerGroup) -> None:
    config = quick(max_model_len=None)
    endless = SamplingConfig(n=8, max_tokens=200, ignore_eos=True)

    async def main() -> tuple[dict[str, float], dict[str, float]]:
        client = RolloutClient(pair.endpoints, config)
        before = await client.fetch_metrics()
        task = asyncio.ensure_future(client.generate(make_requests(64), endless))
        while (await client.fetch_metrics())["num_running"] == 0:
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        end = time.monotonic() + 30
        while (after := await client.fetch_metrics())["num_running"] + after["num_waiting"] > 0:
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        assert client.dispatcher.samples_in_flight == 0
        await client.aclose()
        return before, after

    before, after = asyncio.run(main())
    assert after["generation_tokens"] - before["generation_tokens"] < 64 * 8 * 200  # not all of them were generated


def test_callback_that_raises_cancels_the_other_groups(client: RolloutClient) -> None:
    def on_group(group: Group) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        client.generate_blocking(make_requests(16), SHORT, on_group=on_group)
    assert client.dispatcher.samples_in_flight == 0
    assert client.generate_blocking(make_requests(1), SHORT)[0].complete


# ---- servers that die and are restarted -----------------------------------------------------------------------------
class WeightPush:
    """An on_restart function that checks that the restarted server answers and has received no requests.

    The first `times` calls run `before` and fail instead.
    """

    def __init__(self, client: RolloutClient, before: Callable[[], object] | None = None, times: int = 0) -> None:
        self.client, self.calls = client, list[int]()
        self._before, self._times = before, times

    def __call__(self, index: int, endpoint: Endpoint) -> int:
        from plinth_base.endpoint import call
        from rollout_vllm.client.metrics import server_metrics

        if self._before is not None and self._times > 0:
            self._times -= 1
            self._before()
            raise ConnectionError("the server went away")
        figures = server_metrics(call(endpoint, "GET", "/metrics")[1])
        assert figures["generation_tokens"] <= 1  # the token of the readiness check
        self.calls.append(index)
        return self.client.policy_version


def kill_tree_member(group: ServerGroup, index: int, how: signal.Signals) -> int:
    """Signal the process of the API server (the supervisor's child), as an operator or the kernel would."""
    supervisor = group.servers[index].pid
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    os.kill(int(children[0]), how)
    return int(children[0])


def run_with_fault(client: RolloutClient, fault: threading.Event, sampling: SamplingConfig) -> list[Group]:
    """Generate; `fault` is set when the first group is complete."""
    requests = make_requests(48)
    groups = client.generate_blocking(requests, sampling, on_group=lambda _: fault.set())
    assert_complete(requests, groups, sampling.num_samples)
    assert all(g.complete for g in groups), [g.failures for g in groups if g.failures]
    return groups


def when(fault: threading.Event, action: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        fault.wait(120)
        action()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.thorough
def test_other_server_continues_when_one_is_killed(pair: ServerGroup) -> None:
    client = RolloutClient(pair.endpoints, quick(max_samples_in_flight=64))
    client.set_policy_version(5)
    push, fault = WeightPush(client), threading.Event()
    long = SamplingConfig(n=8, max_tokens=60, ignore_eos=True)
    with client, ServerWatch(pair, client, on_restart=push) as watch:
        killer = when(fault, lambda: kill_tree_member(pair, 1, signal.SIGKILL))
        run_with_fault(client, fault, long)
        killer.join()
        wait_until(lambda: [e.kind for e in watch.events] == ["died", "restarted"])
        assert push.calls == [1]
        groups = client.generate_blocking(make_requests(16), SHORT)
        assert {s.server_url for g in groups for s in g.samples} == {e.url for e in pair.endpoints}
        watch.check()
    pair.check()


@pytest.mark.thorough
def test_only_server_hangs_or_is_killed(pair: ServerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs with one server each, concurrently: one hangs; the other is killed, and again during its restart."""
    monkeypatch.setattr("rollout_vllm.servers.watch._HEALTH_EVERY_S", 0.5)
    monkeypatch.setattr("rollout_vllm.servers.watch._HANG_TIMEOUT_S", 10.0)

    def one_job(position: int, how: signal.Signals, expected: list[str]) -> None:
        alone = ServerGroup(pair.endpoints[position : position + 1], pair.servers[position : position + 1], 300.0)
        client = RolloutClient(alone.endpoints, quick(max_samples_in_flight=64))
        fault = threading.Event()
        push = WeightPush(client, before=lambda: kill_tree_member(alone, 0, how), times=len(expected) - 1)
        with client, ServerWatch(alone, client, on_restart=push) as watch:
            killer = when(fault, lambda: kill_tree_member(alone, 0, how))
            run_with_fault(client, fault, SamplingConfig(n=8, max_tokens=40, ignore_eos=True))
            killer.join()
            assert [e.kind for e in watch.events] == [*expected, "restarted"]
        assert push.calls == [0]
        alone.check()

    with ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(one_job, 0, signal.SIGSTOP, ["hung"]),
            pool.submit(one_job, 1, signal.SIGKILL, ["died", "died"]),
        ]
        for job in jobs:
            job.result()
