"""Short decoding steps: vLLM's scheduler decides and sends, step for step, what it does without the shortcuts."""

import dataclasses
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_vllm_helpers import restoring
from transformers import Qwen3Config
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from rollout_vllm.servers.fast import buffering
from rollout_vllm.servers.fast.buffering import buffer_in_engine_core
from rollout_vllm.servers.fast.decoding import decode_in_short_steps, skip_needless_block_searches
from rollout_vllm.servers.patch import BUFFERING, DECODING, IDS_ONLY

BLOCK = 16


@dataclass(frozen=True)
class Plan:
    """Events of a scheduler. arrivals: (step, prompt length, most tokens, prompt). aborts: (step, request)."""

    arrivals: tuple[tuple[int, int, int, int], ...]
    aborts: tuple[tuple[int, int], ...]
    num_blocks: int
    in_flight: int
    prefix_caching: bool
    sliding_window: bool
    buffered: bool
    log_probs: bool
    stop_strings: bool = False


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
    buffered=st.sampled_from((True, True, True, False)),
    log_probs=st.booleans(),
    stop_strings=st.booleans(),
)


def name_of(number: int) -> str:
    return f"cmpl-{'x' * number}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a configuration and nothing else."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 97}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    Qwen3Config(architectures=["Qwen3ForCausalLM"], **sizes, **heads).save_pretrained(folder)
    return str(folder)


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


def answer(scheduler: Scheduler, scheduled: Any, *, log_probs: bool) -> ModelRunnerOutput:
    """A token for each request whose prompt is complete; it depends on the request and its position alone."""
    names = list(scheduled.num_scheduled_tokens)
    tokens, values = list[list[int]](), list[float]()
    for name in names:
        request = scheduler.requests[name]
        position = request.num_computed_tokens
        sampled = position >= request.num_tokens  # else a part of its prompt is missing
        tokens.append([(7 * position + len(name)) % 97] if sampled else [])
        values.append(-position / 8)
    column = numpy.array(values, numpy.float32)[:, None]
    lists = LogprobsLists(numpy.zeros_like(column, numpy.int32), column, numpy.zeros(len(names), numpy.int32), None)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=tokens,
        logprobs=lists if log_probs and names else None,
    )


def message(output: Any) -> tuple[Any, ...]:
    """The part of a request that the front end receives."""
    lists = output.new_logprobs
    values = None if lists is None else (lists.logprobs.tolist(), lists.logprob_token_ids.tolist())
    return output.request_id, output.new_token_ids, values, output.finish_reason, output.stop_reason


def play(model: str, plan: Plan) -> tuple[list[Any], int]:
    """All that the scheduler decided and sent, and the state of its blocks; the number of preemptions."""
    scheduler, history, waiting, preemptions = scheduler_of(model, plan), list[Any](), deque[Any](), 0
    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    hasher = get_request_block_hasher(BLOCK, function) if plan.prefix_caching else None
    for step in range(600):
        for number, (arrival, length, most, prompt) in enumerate(plan.arrivals):
            if arrival == step:
                ids = [(prompt * 31 + i) % 89 for i in range(length)]
                params = SamplingParams(
                    max_tokens=most,
                    stop_token_ids=[41],
                    stop=["x"] if plan.stop_strings else None,
                    logprobs=0 if plan.log_probs else None,
                    extra_args={IDS_ONLY: 1} if plan.buffered else None,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                scheduler.add_request(Request(name_of(number), ids, params, None, block_hasher=hasher))
        for at, number in plan.aborts:
            if at == step and name_of(number) in scheduler.requests:
                scheduler.finish_requests([name_of(number)], RequestStatus.FINISHED_ABORTED)
        if step > 40 and not scheduler.has_unfinished_requests() and not waiting:
            break
        scheduled = scheduler.schedule()
        preemptions += len(scheduled.preempted_req_ids or ())
        pool = scheduler.kv_cache_manager.block_pool
        new = [(one.req_id, one.block_ids, one.num_computed_tokens) for one in scheduled.scheduled_new_reqs]
        history.append((scheduled.num_scheduled_tokens, repr(scheduled.scheduled_cached_reqs), new))
        history.append((pool.get_num_free_blocks(), scheduled.num_common_prefix_blocks))
        waiting.append((scheduled, answer(scheduler, scheduled, log_probs=plan.log_probs)))
        if len(waiting) == plan.in_flight or not scheduled.num_scheduled_tokens:
            outputs = scheduler.update_from_output(*waiting.popleft())
            sent = [message(output) for client in outputs.values() for output in client.outputs]
            history.append((sent, len(getattr(pool.cached_block_hash_to_block, "_cache", ()))))
    return history, preemptions


@contextmanager
def engine_core(*, shortcuts: bool) -> Iterator[None]:
    """The engine core of our servers, with and without the shortcuts."""
    with restoring() as replace, pytest.MonkeyPatch.context() as monkeypatch:
        buffer_in_engine_core(replace(BUFFERING), IDS_ONLY, "publish_for_test")
        if shortcuts:
            skip_needless_block_searches(replace(DECODING))
            decode_in_short_steps(replace(DECODING))
        else:  # vLLM looks at every token
            monkeypatch.setattr(buffering, "_is_plain_step", lambda *_: False)
        yield


@settings(deadline=None, max_examples=60)
@given(plan=plans)
def test_every_step_is_vllms_own(model: str, plan: Plan) -> None:
    assert BUFFERING.check()
    assert DECODING.check()
    with engine_core(shortcuts=False):
        stock, _ = play(model, plan)
    with engine_core(shortcuts=True):
        short, _ = play(model, plan)
    assert short == stock


def test_most_tokens_take_the_shortcuts_and_preemptions_remain(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

    arrivals = tuple((0, 30, 60, number) for number in range(3))
    plan = Plan(arrivals, (), 9, 2, prefix_caching=True, sliding_window=False, buffered=True, log_probs=True)
    calls = dict[str, int]()

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(KVCacheCoordinator, "allocate_new_blocks")
    count(AsyncScheduler, "_update_request_with_output")
    with engine_core(shortcuts=False):
        stock, preempted = play(model, plan)
    without, calls = calls, {}
    with engine_core(shortcuts=True):
        short, _ = play(model, plan)
    assert preempted > 0
    assert short == stock
    assert 0 < calls["allocate_new_blocks"] < without["allocate_new_blocks"] / 5
    # Those of preempted requests, and those that end a request or complete a message.
    assert 0 < calls["_update_request_with_output"] < without["_update_request_with_output"] / 2


@pytest.mark.parametrize("stop_strings", [True, False])
def test_a_request_with_stop_strings_sends_every_token(model: str, stop_strings: bool) -> None:
    """The front end makes text of them and ends the request; of others, 32 go at a time, or all at the end."""
    plan = Plan(((0, 5, 15, 0),), (), 9, 1, prefix_caching=True, sliding_window=False, buffered=True, log_probs=True)
    with engine_core(shortcuts=True):
        history, _ = play(model, dataclasses.replace(plan, stop_strings=stop_strings))
    messages = [len(ids) for sent, *_ in history if isinstance(sent, list) for _, ids, *_ in sent]
    assert messages == ([1] * 15 if stop_strings else [1, 14])
