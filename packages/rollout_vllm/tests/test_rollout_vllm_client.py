"""The client's pure functions: requests and responses, retries, routing, metrics."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plinth_testing.strategies import json_values
from rollout_vllm import Sample
from rollout_vllm.client.dispatch import Dispatcher
from rollout_vllm.client.group_run import extend
from rollout_vllm.client.metrics import server_metrics
from rollout_vllm.client.protocol import Choice, MalformedAnswerError, completion_body, parse_completion
from rollout_vllm.client.retry import backoff_s, classify_status
from rollout_vllm.config import SamplingConfig
from rollout_vllm.samples import pack_routes
from rollout_vllm.servers.fast.buffering import packed_choice

QUICK = settings(deadline=None, derandomize=True)


def answer(groups: list[tuple[list[int], list[float]]], **changes: object) -> dict[str, object]:
    choices = []
    for index, (ids, values) in enumerate(groups):
        logprobs = {"token_logprobs": values}
        choices.append({"index": index, "token_ids": ids, "logprobs": logprobs, "finish_reason": "stop"} | changes)
    return {"choices": choices}


groups_strategy = st.lists(
    st.lists(st.tuples(st.integers(0, 200_000), st.floats(-50, 0)), max_size=6).map(
        lambda pairs: ([i for i, _ in pairs], [v for _, v in pairs])
    ),
    min_size=1,
    max_size=5,
)


@QUICK
@given(groups_strategy, st.randoms(use_true_random=False))
def test_choices_are_in_index_order(groups: list[tuple[list[int], list[float]]], shuffler: random.Random) -> None:
    body = answer(groups)
    shuffler.shuffle(body["choices"])  # type: ignore[arg-type]
    choices = parse_completion(json.loads(json.dumps(body)), len(groups))
    assert [c.response_ids.tolist() for c in choices] == [ids for ids, _ in groups]
    assert [c.log_probs.tolist() for c in choices] == [np.float32(values).tolist() for _, values in groups]


@QUICK
@given(groups_strategy)
def test_without_log_probs_none_are_asked_for_and_none_are_read(groups: list[tuple[list[int], list[float]]]) -> None:
    body = answer(groups)
    for choice in body["choices"]:  # type: ignore[attr-defined]
        choice["logprobs"] = None
    choices = parse_completion(body, len(groups), log_probs=False)
    assert [(c.response_ids.tolist(), c.log_probs) for c in choices] == [(ids, None) for ids, _ in groups]
    sampling = SamplingConfig(n=2)
    assert completion_body([1], sampling, model=None, seed=None)["logprobs"] == 0
    assert "logprobs" not in completion_body([1], sampling, model=None, seed=None, log_probs=False)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [([-1.0], [-2.0], [-1.0, -2.0]), (None, [-2.0], None), ([-1.0], None, None), ([], None, None)],
)
def test_a_resumed_response_has_log_probs_if_all_its_parts_do(first: Any, second: Any, expected: Any) -> None:
    part = Sample(sample_index=0, response_ids=[1] * len(first or [1]), log_probs=first)
    choice = Choice([2] * len(second or [2]), second, "stop")
    log_probs = extend(part, choice, SamplingConfig(n=1), version=0, last_version=0).log_probs
    assert (None if log_probs is None else log_probs.tolist()) == expected


float32 = st.floats(-50, 0, width=32)


@QUICK
@given(st.lists(st.lists(st.tuples(st.integers(0, 2**31 - 1), float32)), min_size=1, max_size=3), st.booleans())
def test_packed_answers_have_the_numbers_of_lists(choices: list[list[tuple[int, float]]], log_probs: bool) -> None:
    groups = [([i for i, _ in pairs], [value for _, value in pairs]) for pairs in choices]
    lists = answer(groups)
    packed = answer(groups, token_ids=None, logprobs=None)
    for choice, (ids, values) in zip(packed["choices"], groups, strict=True):  # type: ignore[call-overload]
        choice["packed"] = packed_choice(ids, values if log_probs else [])
    for one, other in zip(
        *(parse_completion(body, len(groups), log_probs=log_probs) for body in (packed, lists)), strict=True
    ):
        assert (one.response_ids.dtype, one.response_ids.tolist()) == (np.int32, other.response_ids.tolist())
        assert (one.log_probs is None) == (other.log_probs is None) == (not log_probs)
        np.testing.assert_array_equal(one.log_probs, other.log_probs)


def test_packed_log_probs_are_finite_as_in_lists() -> None:
    ids, values = [1, 2, 3], [float("-inf"), -20000.0, -1.5]
    body = answer([(ids, [])], token_ids=None, logprobs=None, packed=packed_choice(ids, values))
    [choice] = parse_completion(body, 1)
    assert choice.log_probs.tolist() == [-9999.0, -9999.0, -1.5]


@pytest.mark.parametrize(
    "packed",
    [
        None,
        7,
        {},
        {"token_ids": packed_choice([1], [])["token_ids"]},
        packed_choice([1, 2], [-1.0]),
        packed_choice([1], [float("nan")]),
        packed_choice([1], []),
        packed_choice([1], [-1.0]) | {"token_ids": "AQA"},
        packed_choice([1], [-1.0]) | {"token_ids": "AQAA"},
        packed_choice([1], [-1.0]) | {"log_probs": "\u00e9"},
    ],
)
def test_incomplete_packed_answers_are_rejected(packed: object) -> None:
    with pytest.raises(MalformedAnswerError):
        parse_completion(answer([([1], [-1.0])], packed=packed), 1)


ROUTES = np.arange(12, dtype=np.uint16).reshape(3, 2, 2)


def test_experts_of_every_computed_token_are_read() -> None:
    body = answer([([1, 2], [-1.0, -2.0])], routed_experts=pack_routes(ROUTES))
    [choice] = parse_completion(body, 1, num_routed=2)
    assert (choice.routes.dtype, choice.routes.tolist()) == (np.uint16, ROUTES.tolist())
    assert parse_completion(body, 1)[0].routes is None, "they were not asked for"
    [empty] = parse_completion(answer([([], [])], finish_reason="abort"), 1, num_routed=2)
    assert empty.routes is None, "interrupted before its first token"


@pytest.mark.parametrize(
    "routes",
    [None, 5, "?", "AAAA", pack_routes(ROUTES[:2]), pack_routes(ROUTES[0]), pack_routes(ROUTES.astype(np.float32))],
)
def test_answers_without_the_experts_of_every_token_are_rejected(routes: object) -> None:
    with pytest.raises(MalformedAnswerError):
        parse_completion(answer([([1, 2], [-1.0, -2.0])], routed_experts=routes), 1, num_routed=2)


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [],
        {},
        {"choices": "x"},
        {"choices": []},
        answer([([1], [-1.0]), ([1], [-1.0]), ([1], [-1.0])]),
        answer([([1], [-1.0])]),
        answer([([1], [-1.0]), ([1], [-1.0])], index=0),
        answer([([1], [-1.0]), ([1, 2], [-1.0])]),
        answer([([1], [-1.0]), ([1], [float("nan")])]),
        answer([([1], [-1.0]), ([1], [None])]),  # type: ignore[list-item]
        answer([([1], [-1.0]), ([1], [-1.0])], finish_reason=None),
        answer([([1], [-1.0]), ([1], [-1.0])], logprobs=None),
        answer([([1], [-1.0]), ([1], [-1.0])], token_ids=["a"]),
        answer([([1], [-1.0]), ([1], [-1.0])], token_ids=None),
    ],
)
def test_incomplete_responses_are_rejected(bad: object) -> None:
    with pytest.raises(MalformedAnswerError):
        parse_completion(bad, 2)


@QUICK
@given(json_values())
def test_any_other_json_is_rejected(junk: object) -> None:
    for body in (junk, {"choices": junk}, {"choices": [junk]}, {"choices": [{"index": 0, "logprobs": junk}]}):
        with pytest.raises(MalformedAnswerError):
            parse_completion(body, 1)


def test_request_overrides_every_server_default() -> None:
    sampling = SamplingConfig(n=3, temperature=0.7, max_tokens=9, stop_token_ids=(5,), ignore_eos=True, min_tokens=2)
    body = completion_body([1, 2], sampling, model="policy", seed=7)
    for field in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "max_tokens"):
        assert field in body
    assert (body["n"], body["seed"], body["stop_token_ids"], body["min_tokens"]) == (3, 7, [5], 2)
    assert "seed" not in completion_body([1], sampling, model=None, seed=None)
    assert (body["stop"], body["skip_special_tokens"]) == ([], True)
    stopped = completion_body([1], SamplingConfig(stop=("</s>",)), model=None, seed=None)
    assert (stopped["stop"], stopped["skip_special_tokens"]) == (["</s>"], False)
    assert json.loads(json.dumps(body)) == body


def test_a_request_has_numbers_where_the_configuration_has_none() -> None:
    body = completion_body([1], SamplingConfig(), model=None, seed=None)
    assert (body["n"], body["max_tokens"]) == (8, 256)
    assert None not in body.values()


@pytest.mark.parametrize(
    ("status", "message", "kind", "retry", "blame"),
    [
        (429, "slow down", "server", True, False),
        (500, "oops", "server", True, True),
        (503, "", "server", True, True),
        (408, "", "server", True, True),
        (400, "This model's maximum context length is 128 tokens", "too_long", False, False),
        (400, "bad top_p", "refused", False, False),
        (401, "Unauthorized", "refused", False, False),
        (404, "no such model", "refused", False, False),
    ],
)
def test_classify_status(status: int, message: str, kind: str, retry: bool, blame: bool) -> None:
    decision = classify_status(status, message)
    assert (decision.kind, decision.retry, decision.blame_server) == (kind, retry, blame)


@QUICK
@given(st.integers(1, 1000), st.floats(0, 1, exclude_max=True), st.floats(-5, 1e6))
def test_backoff_is_within_its_window(attempt: int, jitter: float, after: float) -> None:
    delay = backoff_s(attempt, jitter=jitter)
    assert 0 <= delay <= min(10.0, 0.2 * 2.0 ** min(attempt - 1, 60))
    assert 10.0 >= backoff_s(attempt, jitter=jitter, retry_after_s=after) >= max(delay, min(after, 10.0))


@QUICK
@given(st.integers(1, 4), st.integers(1, 32), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 99)), max_size=80))
def test_router_counts_samples_and_respects_its_limit(servers: int, limit: int, steps: list[tuple[int, int]]) -> None:
    router, in_flight = Dispatcher(servers, max_in_flight=limit), list[tuple[int, int]]()
    for now, (action, number) in enumerate(steps):
        if action <= 2:
            cost = number % 9 + 1
            chosen = router.pick(f"g{number % 5}", cost, now)
            free = [s for s in range(servers) if not router.blocked[s]]
            if chosen is None:
                assert not free or any(router.load[s] > 0 for s in free)  # a request in flight will wake the queue
            else:
                assert chosen in free
                in_flight.append((chosen, cost))
                alone = sum(1 for s, _ in in_flight if s == chosen) == 1
                assert router.load[chosen] <= limit or alone
        elif action == 3 and in_flight:
            router.release(*in_flight.pop(number % len(in_flight)))
        elif action == 4:
            router.failed(number % servers, now)
        else:
            (router.block if number % 2 else router.unblock)(number % servers)
        assert router.load == [sum(c for s, c in in_flight if s == index) for index in range(servers)]


def test_router_balances_load_and_keeps_affinity() -> None:
    router = Dispatcher(3, max_in_flight=1000)
    homes = {g: router.pick(g, 8, 0.0) for g in map(str, range(30))}
    assert set(Counter(homes.values()).values()) == {10}
    for group, home in homes.items():
        assert home is not None
        router.release(home, 8)
        assert router.pick(group, 8, 0.0) == home


def test_router_cools_failed_servers_down_and_probes_when_all_are_down() -> None:
    router = Dispatcher(2, max_in_flight=100)
    router.failed(0, 0.0)
    assert [router.pick(str(i), 1, 0.5) for i in range(3)] == [1, 1, 1]
    router.failed(1, 0.5)
    assert router.pick("x", 1, 0.6) == 0  # its cooldown ends first
    assert router.pick("y", 1, 0.6, avoid=[0]) == 0  # no other server is available
    router.failed(0, 1.1)
    assert router.pick("z", 1, 2.0) == 1  # the second cooldown of server 0 is longer
    router.block(0)
    router.block(1)
    assert router.pick("w", 1, 99.0) is None
    router.unblock(0)
    assert router.pick("w", 1, 99.0) == 0


METRICS = """# HELP vllm:num_requests_running Number
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:prefix_cache_queries_total{engine="0"} 10.0
vllm:prefix_cache_hits_total{engine="0"} 4.0
vllm:request_success_total{finished_reason="stop"} 2.0
vllm:request_success_total{finished_reason="length"} 5.0
vllm:e2e_request_latency_seconds_bucket{le="+Inf"} 7 1395066363000
broken
nan_metric NaN
"""


def test_metrics() -> None:
    one = server_metrics(METRICS)
    assert one == {"num_running": 3.0, "prefix_cache_queries": 10.0, "prefix_cache_hits": 4.0}
    assert server_metrics(METRICS + 'vllm:num_requests_running{engine="1"} 4.0\n')["num_running"] == 7.0  # all labels
    with pytest.raises(ValueError):
        server_metrics("vllm:num_requests_running three\n")
