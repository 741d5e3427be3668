"""Partial rollouts on real servers: pause and resume around a policy update, the first groups, aborts by others."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from rollout_vllm_helpers import FaultyProxy, assert_complete, config_for_tests, make_requests, reference_log_probs

from plinth_base.endpoint import call
from plinth_testing import wait_until
from rollout_vllm import (
    ControlError,
    Group,
    Request,
    RolloutClient,
    SamplingConfig,
    ServerGroup,
)
from rollout_vllm.client.metrics import server_metrics
from rollout_vllm.client.protocol import Choice, completion_body, parse_completion
from rollout_vllm.servers.fast.buffering import INTERVAL

pytestmark = [pytest.mark.slow, pytest.mark.long]  # two servers
LONG = SamplingConfig(n=4, max_tokens=200, ignore_eos=True, temperature=0.8)


def started(client: RolloutClient, requests: list[Request]) -> Future[list[Group]]:
    """Start generation in the background and wait until both servers have generated tokens."""

    def tokens() -> list[float]:
        texts = [call(endpoint, "GET", "/metrics")[1] for endpoint in client.endpoints]
        return [server_metrics(text)["generation_tokens"] for text in texts]

    before = tokens()
    future = client.start(client.generate(requests, LONG))
    wait_until(lambda: all(now > then + 100 for now, then in zip(tokens(), before, strict=True)))
    assert not future.done()
    return future


def assert_idle(client: RolloutClient) -> None:
    """No tokens are generated. vLLM's gauges keep their last values when it is idle, but its counters do not change."""
    end = time.monotonic() + 120
    while True:
        before = client.metrics()["generation_tokens"]
        time.sleep(0.5)
        if client.metrics()["generation_tokens"] == before:
            return
        assert time.monotonic() < end


def test_pause_keeps_every_token_with_its_version_and_log_prob(
    pair: ServerGroup, client: RolloutClient, model_folder: Path, adapter_folder: Path
) -> None:
    requests = make_requests(48, step=21)  # enough that some still wait when both servers have begun
    future = started(client, requests)
    client.run(client.pause(timeout_s=300))
    assert client.dispatcher.samples_in_flight == 0
    assert_idle(client)
    assert not future.done()
    adapter = {"lora_name": "adapter", "lora_path": str(adapter_folder)}  # the new policy
    for endpoint in pair.endpoints:
        assert call(endpoint, "POST", "/v1/load_lora_adapter", adapter)[0] == 200
    client.set_model("adapter")
    client.resume(1)
    try:
        groups = future.result(400)
    finally:
        for endpoint in pair.endpoints:
            assert call(endpoint, "POST", "/v1/unload_lora_adapter", adapter)[0] == 200
    assert_complete(requests, groups, 4)
    samples = [sample for group in groups for sample in group.samples]
    assert all(len(s.response_ids) == len(s.log_probs) == 200 for s in samples)
    assert all(sum(span.num_tokens for span in s.version_spans) == 200 for s in samples)
    mixed = [s for s in samples if [span.policy_version for span in s.version_spans] == [0, 1]]
    assert mixed
    assert {s.last_policy_version for s in mixed} == {1}
    prompts = {r.prompt_id: list(r.prompt_ids) for r in requests}
    chosen = samples[::16] + mixed[:4]
    cases = [(prompts[s.prompt_id], s.response_ids.tolist()) for s in chosen]
    theirs = reference_log_probs(cases, temperature=LONG.temperature, model=model_folder, adapters=[adapter_folder])
    worst, other = 0.0, 0.0
    for sample, both in zip(chosen, theirs, strict=True):
        for place, version in enumerate(sample.versions.tolist()):
            worst = max(worst, abs(sample.log_probs[place] - both[version][place]))
            other = max(other, abs(sample.log_probs[place] - both[1 - version][place]))
    assert worst < 5e-3
    assert other > 0.1  # the policies differ, so a wrong version would be detected


def test_generate_first_returns_early_and_the_rest_is_resumed(client: RolloutClient) -> None:
    sampling = SamplingConfig(n=2, max_tokens=200)  # responses end at random lengths
    requests = make_requests(24, step=22)
    reported: list[str] = []
    first, rest = client.run(
        client.generate_first(requests, sampling, num_groups=8, on_group=lambda g: reported.append(g.prompt_id))
    )
    assert len(first) == 8
    assert all(group.complete for group in first)
    assert sorted(reported) == sorted(group.prompt_id for group in first)
    assert len(rest) == 16
    kept = sum(len(part.response_ids) for group in rest for part in group.samples)
    assert kept > 0
    before = client.counters.response_tokens
    second = client.generate_blocking(rest, sampling)
    assert_complete([group.request for group in rest], second, 2)
    assert all(group.complete for group in second)
    total = sum(len(s.response_ids) for group in second for s in group.samples)
    assert client.counters.response_tokens - before == total - kept  # no token was generated twice
    assert sorted(r.prompt_id for r in requests) == sorted(g.prompt_id for g in [*first, *second])

    discarded, rest = client.run(client.generate_first(requests, LONG, num_groups=2, keep_rest=False))
    assert (len(discarded), rest) == (2, [])
    assert_idle(client)


def test_pause_by_another_client_loses_no_token(pair: ServerGroup, client: RolloutClient) -> None:
    requests = make_requests(100, step=23)  # seconds of work: on a busy machine the pause is late
    future = started(client, requests)
    for endpoint in pair.endpoints:
        assert call(endpoint, "POST", "/pause?mode=abort", timeout_s=300)[0] == 200
    time.sleep(0.3)
    for endpoint in pair.endpoints:
        assert call(endpoint, "POST", "/resume", timeout_s=300)[0] == 200
    groups = future.result(400)
    assert_complete(requests, groups, 4)
    assert all(len(s.response_ids) == 200 for g in groups for s in g.samples)
    assert client.counters.response_tokens == len(requests) * 4 * 200
    assert client.counters.num_retries > 0


@pytest.mark.parametrize("route", ["/pause?mode=abort", "/abort_requests"])
def test_aborted_answers_hold_tokens_that_the_engine_core_had_not_sent(
    pair: ServerGroup, client: RolloutClient, route: str
) -> None:
    """The engine core sends a first token, and then `INTERVAL` at a time; the rest comes with the abort."""
    [endpoint, _] = pair.endpoints
    sampling = SamplingConfig(n=2, max_tokens=230, ignore_eos=True)

    def send(number: int) -> list[Choice]:
        body = completion_body([5 + number, 6, 7], sampling, model=None, seed=number)
        status, text = call(endpoint, "POST", "/v1/completions", body, timeout_s=300)
        assert status == 200, text
        return parse_completion(json.loads(text), sampling.num_samples)

    def has_unsent_tokens() -> bool:
        before = client.metrics()["generation_tokens"]
        with ThreadPoolExecutor(6) as pool:
            answers = []
            for number in range(6):
                answers.append(pool.submit(send, number))
                time.sleep(0.02)  # so that the requests have different numbers of tokens
            wait_until(lambda: client.metrics()["generation_tokens"] > before + 6 * INTERVAL)
            assert call(endpoint, "POST", route, {}, timeout_s=300)[0] == 200
            aborted = [c for answer in answers for c in answer.result(300) if c.finish_reason == "abort"]
        assert call(endpoint, "POST", "/resume", timeout_s=300)[0] == 200
        lengths = [len(choice.response_ids) for choice in aborted]
        assert lengths == [len(choice.log_probs) for choice in aborted]
        return any(length > 1 and (length - 1) % INTERVAL for length in lengths)

    # On a busy machine the abort may come when all have ended, or just after the engine core has sent.
    assert any(has_unsent_tokens() for _ in range(10))


def test_failed_pause_changes_nothing(proxy: FaultyProxy) -> None:
    """Servers without the control routes, and servers that do not return their requests."""
    proxy.plan.extend(["hang"] * 2)
    with RolloutClient([proxy.endpoint], config_for_tests(max_retries=0)) as client:
        future = client.start(client.generate(make_requests(2), LONG))
        wait_until(lambda: proxy.num_requests == 2)
        with pytest.raises(ControlError):
            client.run(client.pause(timeout_s=1.0))
        proxy.without_control_routes = True
        with pytest.raises(ControlError):
            client.run(client.pause())
        assert client.generate_blocking(make_requests(1, step=1), SamplingConfig(n=1, max_tokens=2))[0].complete
        future.cancel()
