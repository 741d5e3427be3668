"""Short scheduling: vLLM's scheduler with it decides, step for step, what it decides without it."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from rollout_vllm.servers.decoding import skip_needless_block_searches
from rollout_vllm.servers.patch import DECODING

BLOCK = 16


@dataclass(frozen=True)
class Plan:
    """What happens to a scheduler. arrivals: (step, prompt length, most tokens, prompt). aborts: (step, request)."""

    arrivals: tuple[tuple[int, int, int, int], ...]
    aborts: tuple[tuple[int, int], ...]
    num_blocks: int
    in_flight: int
    prefix_caching: bool
    sliding_window: bool


plans = st.builds(
    Plan,
    arrivals=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 50), st.integers(1, 60), st.integers(0, 2)), min_size=1, max_size=8
    ).map(tuple),
    aborts=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 7)), max_size=2).map(tuple),
    num_blocks=st.integers(9, 40),  # 8 hold the longest request
    in_flight=st.integers(1, 2),
    prefix_caching=st.booleans(),
    sliding_window=st.sampled_from((False, False, False, True)),
)


@pytest.fixture(scope="module")
def model(model_folder: Path) -> str:
    return str(model_folder)


@cache
def configuration(model: str, asynchronous: bool, prefix_caching: bool) -> VllmConfig:
    return VllmConfig(
        model_config=ModelConfig(model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=120),
        scheduler_config=SchedulerConfig(
            max_num_seqs=6,
            max_num_batched_tokens=64,
            max_model_len=120,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=asynchronous,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=prefix_caching),
        device_config=DeviceConfig(device="cpu"),
    )


def scheduler_of(model: str, plan: Plan) -> Scheduler:
    asynchronous = plan.in_flight > 1
    config = configuration(model, asynchronous, plan.prefix_caching)
    config.cache_config.num_gpu_blocks = plan.num_blocks
    sizes = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    spec = SlidingWindowSpec(**sizes, sliding_window=24) if plan.sliding_window else FullAttentionSpec(**sizes)
    return (AsyncScheduler if asynchronous else Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(plan.num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )


def answer(scheduler: Scheduler, scheduled: Any) -> ModelRunnerOutput:
    """A token for each request whose prompt is complete; it depends on the request and its position alone."""
    names = list(scheduled.num_scheduled_tokens)
    tokens: list[list[int]] = []
    for name in names:
        request = scheduler.requests[name]
        position = request.num_computed_tokens
        sampled = position >= request.num_tokens  # else a part of its prompt is missing
        tokens.append([(7 * position + len(name)) % 97] if sampled else [])
    places = {name: i for i, name in enumerate(names)}
    return ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=tokens)


def play(model: str, plan: Plan) -> tuple[list[Any], int]:
    """All that the scheduler decided and answered, and the state of its blocks; the number of preemptions."""
    scheduler, history, waiting, preemptions = scheduler_of(model, plan), list[Any](), deque[Any](), 0
    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    hasher = get_request_block_hasher(BLOCK, function) if plan.prefix_caching else None
    for step in range(600):
        for number, (arrival, length, most, prompt) in enumerate(plan.arrivals):
            if arrival == step:
                ids = [(prompt * 31 + i) % 89 for i in range(length)]
                params = SamplingParams(max_tokens=most, stop_token_ids=[41])
                scheduler.add_request(Request(f"r{number:0{number + 1}}", ids, params, None, block_hasher=hasher))
        for at, number in plan.aborts:
            name = f"r{number:0{number + 1}}"
            if at == step and name in scheduler.requests:
                scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        if step > 40 and not scheduler.has_unfinished_requests() and not waiting:
            break
        scheduled = scheduler.schedule()
        preemptions += len(scheduled.preempted_req_ids or ())
        pool = scheduler.kv_cache_manager.block_pool
        new = [(one.req_id, one.block_ids, one.num_computed_tokens) for one in scheduled.scheduled_new_reqs]
        history.append((scheduled.num_scheduled_tokens, repr(scheduled.scheduled_cached_reqs), new))
        history.append((pool.get_num_free_blocks(), scheduled.num_common_prefix_blocks))
        waiting.append((scheduled, answer(scheduler, scheduled)))
        if len(waiting) == plan.in_flight or not scheduled.num_scheduled_tokens:
            outputs = scheduler.update_from_output(*waiting.popleft())
            sent = [(o.request_id, o.new_token_ids, o.finish_reason) for c in outputs.values() for o in c.outputs]
            history.append((sent, len(getattr(pool.cached_block_hash_to_block, "_cache", ()))))
    return history, preemptions


@contextmanager
def shortened() -> Iterator[None]:
    undo = skip_needless_block_searches(DECODING.replace)
    try:
        yield
    finally:
        for restore in undo:
            restore()


@settings(deadline=None, max_examples=60)
@given(plan=plans)
def test_every_step_is_vllms_own(model: str, plan: Plan) -> None:
    assert DECODING.check()
    stock, _ = play(model, plan)
    with shortened():
        short, _ = play(model, plan)
    assert short == stock


def test_searches_are_skipped_and_preemptions_remain(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the calls for decoded tokens about one in sixteen is left, also while requests are preempted."""
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

    plan = Plan(tuple((0, 30, 60, number) for number in range(3)), (), 9, 2, True, False)
    searches = list[str]()
    original = KVCacheCoordinator.allocate_new_blocks

    def counted(self: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
        searches.append(request_id)
        return original(self, request_id, *args, **kwargs)

    monkeypatch.setattr(KVCacheCoordinator, "allocate_new_blocks", counted)
    stock, preempted = play(model, plan)
    all_searches, searches[:] = len(searches), []
    with shortened():
        short, _ = play(model, plan)
    assert preempted > 0
    assert short == stock
    assert 0 < len(searches) < all_searches / 5
