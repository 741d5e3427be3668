"""Requests that a push holds: what becomes of their KV cache, and that no other request uses it."""

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import weight_sync_helpers as helpers
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from plinth_testing import raises
from weight_sync import ModuleSource, SyncConfig, SyncConfigError, WeightPusher, WeightSyncError
from weight_sync.push.session import PushSession
from weight_sync.vllm_plugin import engine, held_requests
from weight_sync.vllm_plugin.held_requests import PATCH, beside_held_requests, drop_beside

BLOCK = 4
MIXED = -1


class Cache:
    """vLLM's KV cache manager; knows which policy computed each block, `MIXED` if from keys and values of an older one.

    Prompts and responses are made of few tokens, so that a prompt often begins with another request's tokens.
    """

    def __init__(self) -> None:
        init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        config = KVCacheConfig(200, [], [KVCacheGroupSpec(["layer"], spec)])
        self.manager = KVCacheManager(config, 128, BLOCK, BLOCK)
        self.version, self.num_started, self.num_hits = 0, 0, 0
        self.running: list[Request] = []
        self.policy: dict[str, int] = {}
        self.computed_by: dict[int, int] = {}

    def start(self, tokens: list[int], num_prefilled: int) -> None:
        """A new request; all blocks that it finds were computed by the current policy alone."""
        params = SamplingParams(max_tokens=100)
        hasher = get_request_block_hasher(BLOCK, sha256)
        request = Request(f"r{self.num_started}", list(tokens), params, None, block_hasher=hasher)
        self.num_started += 1
        self.policy[request.request_id] = self.version
        blocks, num_found, *_ = self.manager.get_computed_blocks(request)
        assert all(self.computed_by[block.block_id] == self.version for block in blocks.blocks[0])
        self.num_hits += num_found
        count = max(1, min(num_prefilled, len(tokens) - num_found))
        assert self.manager.allocate_slots(request, count, num_found, blocks) is not None
        self._computed(request, num_found, num_found + count)
        self.running.append(request)

    def run(self, index: int, num_tokens: int) -> None:
        """Decode `num_tokens` tokens, after the rest of the prompt."""
        request = self.running[index % len(self.running)]
        for _ in range(num_tokens):
            begin = request.num_computed_tokens
            if begin == request.num_tokens:
                request.append_output_token_ids(7)
            assert self.manager.allocate_slots(request, request.num_tokens - begin) is not None
            self._computed(request, begin, request.num_tokens)

    def _computed(self, request: Request, begin: int, end: int) -> None:
        request.num_computed_tokens = end
        for block_id in self.manager.get_block_ids(request.request_id)[0][begin // BLOCK : -(-end // BLOCK)]:
            self.computed_by[block_id] = self.policy[request.request_id]

    def finish(self, index: int) -> None:
        self.manager.free(self.running.pop(index % len(self.running)))

    def push(self) -> None:
        drop_beside(self.running, self.manager.block_pool)
        self.version += 1
        self.policy = dict.fromkeys((request.request_id for request in self.running), MIXED)


PROMPT_OF_CACHE = st.integers(1, 24).map(lambda length: [7] * length) | st.lists(st.sampled_from((7, 8)), min_size=1)
ACTION = st.one_of(
    st.tuples(st.just("start"), PROMPT_OF_CACHE, st.sampled_from((1, 6, 99))),
    st.tuples(st.just("run"), st.integers(0, 5), st.integers(1, 12)),
    st.tuples(st.just("finish"), st.integers(0, 5)),
    st.tuples(st.just("push")),
)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(ACTION, min_size=5, max_size=25))
def test_new_requests_find_only_blocks_of_the_current_policy(actions: list[tuple[Any, ...]]) -> None:
    cache = Cache()
    for name, *arguments in actions:
        if name in ("start", "push") or cache.running:
            getattr(cache, name)(*arguments)


@pytest.mark.parametrize(("length", "num_prefilled"), [(3, 3), (20, 3), (20, 6), (20, 20)])
def test_blocks_of_held_requests_do_not_extend_those_of_new_ones(length: int, num_prefilled: int) -> None:
    """Also not when the request was held before its first block was full, or in the middle of its prompt."""
    cache = Cache()
    cache.start([7] * length, num_prefilled)
    cache.push()
    cache.run(0, 40)
    cache.start([7] * 9, 9)
    cache.start([7] * 40, 40)
    assert cache.num_hits == 8  # from the second request's two full blocks
    cache.start([7] * 40, 40)
    assert cache.num_hits == 8 + 36


def test_requests_with_images_are_refused() -> None:
    pool: Any = None
    with pytest.raises(RuntimeError):
        drop_beside([SimpleNamespace(has_encoder_inputs=True)], pool)


@pytest.mark.parametrize(
    ("changes", "is_ours"),
    [
        ({}, True),
        ({"pause_state": PauseState.PAUSED_NEW}, False),
        ({"requests": {}}, False),
        ({"vllm_config": SimpleNamespace(weight_transfer_config=None)}, False),
        ({"vllm_config": SimpleNamespace(weight_transfer_config=SimpleNamespace(backend="ipc"))}, False),
    ],
)
def test_other_resets_are_those_of_vllm(
    changes: dict[str, Any], is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scheduler, "reset_prefix_cache", lambda *_: "vllm's")
    cache = Cache()
    cache.start([7] * 20, 20)
    scheduler: Any = SimpleNamespace(
        pause_state=PauseState.PAUSED_ALL,
        requests={"r0": cache.running[0]},
        kv_cache_manager=cache.manager,
        vllm_config=SimpleNamespace(weight_transfer_config=SimpleNamespace(backend="plinth")),
        reset_connector_cache=lambda: False,
    )
    vars(scheduler).update(changes)
    reset = held_requests.beside_held_requests(Scheduler.reset_prefix_cache)
    assert reset(scheduler) is True
    assert (cache.running[0].cache_salt is not None) == is_ours
    assert reset(scheduler, reset_connector=True) is (not is_ours)


def test_installed_vllm_can_keep_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PATCH.problem() is None
    monkeypatch.setattr(Scheduler, "reset_prefix_cache", Scheduler.reset_prefix_cache)
    PATCH.wrap(beside_held_requests)
    assert Scheduler.reset_prefix_cache.patch is PATCH  # type: ignore[attr-defined]


# ---- on a server -------------------------------------------------------------------------------------------------
PROMPT = [11, 3, 42, 9, 17, 23]
NUM_TOKENS = 110


def lines_of(server: helpers.Server, num_tokens: int) -> Iterator[tuple[int, float]]:
    """Greedy tokens and their log-probs, one by one."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    body = {"model": "policy", "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0.0, "logprobs": 1}
    body |= {"return_token_ids": True, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.api_key}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            [choice] = json.loads(line[6:])["choices"]
            yield from zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
    connection.close()


def generate_across_push(
    server: helpers.Server, pusher: WeightPusher, old: list[int]
) -> tuple[list[int], list[float], int]:
    """A response with a push in the middle, its log-probs, and the number of tokens before the push."""
    with ThreadPoolExecutor(1) as pool:
        pushed, response = None, []
        for number, pair in enumerate(lines_of(server, NUM_TOKENS)):
            response.append(pair)
            pushed = pool.submit(pusher.push, 2) if number == 3 else pushed
        assert pushed is not None
        assert pushed.result().num_attempts == 1
    tokens = [token for token, _ in response]
    assert len(tokens) == NUM_TOKENS
    num_old = next((i for i, (a, b) in enumerate(zip(tokens, old, strict=True)) if a != b), NUM_TOKENS)
    return tokens, [log_prob for _, log_prob in response], num_old


@torch.no_grad()
def continued(old: Any, new: Any, ids: list[int], response: list[int]) -> list[tuple[int, float]]:
    """Greedy tokens of `new` after `ids`, fed with `response`, on the KV cache of `old` for all `ids` but the last."""
    cache = old(torch.tensor([ids[:-1]]), use_cache=True).past_key_values
    made = []
    for fed in (ids[-1], *response[:-1]):
        out = new(torch.tensor([[fed]]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        log_probs_V = out.logits[0, -1].float().log_softmax(-1)
        made.append((int(log_probs_V.argmax()), float(log_probs_V[response[len(made)]])))
    return made


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("running_requests", ["keep", "recompute"])
def test_held_request_continues_with_the_new_weights(
    server: helpers.Server, old_model: Any, new_model: Any, running_requests: Any
) -> None:
    """Computed again by transformers: with the old policy's keys and values (keep), or without any (recompute)."""
    config = SyncConfig(running_requests=running_requests)
    old = helpers.expected(old_model, PROMPT, NUM_TOKENS)
    for _ in range(5):  # on a busy machine the response may end before the push
        with WeightPusher(ModuleSource(old_model), [server]) as back:
            back.push(1)
        with WeightPusher(ModuleSource(new_model), [server], config) as pusher:
            tokens, log_probs, num_old = generate_across_push(server, pusher, old)
        if 4 <= num_old < NUM_TOKENS - 8:
            break
    # A new request: its prompt begins with the tokens that the held one has computed.
    assert helpers.generate(server, PROMPT, 32)[0] == helpers.expected(new_model, PROMPT, 32)
    again = [*PROMPT, *tokens[:80]]
    assert helpers.generate(server, again, 20)[0] == helpers.expected(new_model, again, 20)
    assert 4 <= num_old < NUM_TOKENS - 8
    # Where the policies agree on the first tokens after the push, the change is earlier than the first difference.
    rest, worst = tokens, float("inf")
    for begin in range(num_old, max(0, num_old - 10), -1):
        ids, rest = [*PROMPT, *tokens[:begin]], tokens[begin:]
        reference = continued(old_model if running_requests == "keep" else new_model, new_model, ids, rest)
        if [token for token, _ in reference] == rest:
            worst = max(abs(a - b) for (_, a), b in zip(reference, log_probs[begin:], strict=True))
            clean = helpers.log_probs_of(new_model, ids, rest)
            break
    assert worst < 1e-3
    difference = sum(abs(a - b) for a, b in zip(clean, log_probs[-len(rest) :], strict=True)) / len(rest)
    assert difference > 0.05 if running_requests == "keep" else difference < 1e-3


@pytest.mark.parametrize("hello", [{"cannot_keep": "too old"}, {}])
def test_server_that_cannot_keep_requests_is_refused(hello: dict[str, str]) -> None:
    session = PushSession.__new__(PushSession)
    session._config = SyncConfig(running_requests="keep")
    with raises(SyncConfigError, field="running_requests", value="keep"):
        session._check_can_keep("http://s", hello)
    session._check_can_keep("http://s", {"cannot_keep": ""})


def test_problem_of_the_server_is_in_its_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = replace(PATCH, reads={"vllm.v1.request:Request": ("renamed",)})
    monkeypatch.setattr(held_requests, "PATCH", changed)
    worker: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(rank=0), device=torch.device("cpu"), _receivers={}, _plans={}, _process="p"
    )
    hello = engine.PlinthEngine._hello(worker, engine.UpdateInfo(trainer="t"))
    assert hello["cannot_keep"] == "vllm.v1.request:Request has no renamed"
    assert issubclass(SyncConfigError, WeightSyncError)
