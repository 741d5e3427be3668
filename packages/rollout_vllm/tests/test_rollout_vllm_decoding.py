"""Short decoding steps: vLLM's scheduler decides and sends, step for step, what it does without the shortcuts."""

import copy
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
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rollout_vllm_helpers import restoring
from transformers import Qwen3Config
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, LoRAConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCoreProc
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
    """Events of a scheduler, by step, and what it is made of.

    arrivals: (step, prompt length, most tokens, prompt). aborts: (step, request). pauses: (step, steps, state).
    resets: steps before which all requests are preempted and the prefix cache is emptied. versions: steps before which
    a policy version is published.
    """

    arrivals: tuple[tuple[int, int, int, int], ...]
    aborts: tuple[tuple[int, int], ...] = ()
    pauses: tuple[tuple[int, int, PauseState], ...] = ()
    resets: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()
    num_blocks: int = 60
    seats: int = 6
    """Most running requests."""
    in_flight: int = 2
    throttled: int = 1
    """Prompts are computed in every so many-th step, as the replicas of a data-parallel server do."""
    prefix_caching: bool = True
    sliding_window: bool = False
    buffered: bool = True
    log_probs: bool = True
    stop_strings: bool = False
    priorities: bool = False
    adapters: bool = False
    """Requests have one of two LoRA adapters, and only one of them fits."""
    resumable: bool = False
    """The first request waits for more of its prompt when it ends."""
    v2_runner: bool = False


STEPS = st.integers(0, 60)
SELDOM = st.sampled_from((False, False, False, True))
MAX_MODEL_LEN = 120
MAX_NUM_BATCHED_TOKENS = 64
plans = st.builds(
    Plan,
    arrivals=st.lists(
        st.tuples(
            st.integers(0, 40),
            st.one_of(st.integers(1, 50), st.integers(1, MAX_MODEL_LEN - 1)),
            st.one_of(st.integers(1, 3), st.integers(1, 60)),
            st.integers(0, 2),
        ),
        min_size=1,
        max_size=8,
    ).map(tuple),
    aborts=st.lists(st.tuples(STEPS, st.integers(0, 7)), max_size=2).map(tuple),
    pauses=st.lists(
        st.tuples(STEPS, st.integers(1, 5), st.sampled_from((PauseState.PAUSED_NEW, PauseState.PAUSED_ALL))), max_size=2
    ).map(tuple),
    resets=st.lists(STEPS, max_size=1).map(tuple),
    versions=st.lists(STEPS, max_size=2).map(tuple),
    num_blocks=st.integers(9, 40),  # 8 hold the longest request
    seats=st.sampled_from((1, 2, 3, 6)),
    in_flight=st.integers(1, 2),
    throttled=st.sampled_from((1, 1, 1, 3)),
    prefix_caching=st.booleans(),
    sliding_window=SELDOM,
    buffered=st.sampled_from((True, True, True, False)),
    log_probs=st.booleans(),
    stop_strings=SELDOM,
    priorities=SELDOM,
    adapters=SELDOM,
    resumable=SELDOM,
    v2_runner=st.booleans(),
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
def configuration(model: str, asynchronous: bool, prefix_caching: bool, priorities: bool, seats: int) -> VllmConfig:
    return VllmConfig(
        model_config=ModelConfig(model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN),
        scheduler_config=SchedulerConfig(
            max_num_seqs=seats,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=asynchronous,
            policy="priority" if priorities else "fcfs",
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=prefix_caching),
        device_config=DeviceConfig(device="cpu"),
    )


def scheduler_of(model: str, plan: Plan) -> Scheduler:
    asynchronous = plan.in_flight > 1
    config = configuration(model, asynchronous, plan.prefix_caching, plan.priorities, plan.seats)
    config.cache_config.num_gpu_blocks = plan.num_blocks
    sizes = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    spec = SlidingWindowSpec(**sizes, sliding_window=24) if plan.sliding_window else FullAttentionSpec(**sizes)
    scheduler = (AsyncScheduler if asynchronous else Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(plan.num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )
    scheduler.use_v2_model_runner = plan.v2_runner
    scheduler.lora_config = LoRAConfig(max_loras=1, max_lora_rank=8) if plan.adapters else None
    return scheduler


def request_of(plan: Plan, number: int, hasher: Any) -> Request:
    _, length, most, prompt = plan.arrivals[number]
    params = SamplingParams(
        max_tokens=most,
        stop_token_ids=[41],
        stop=["x"] if plan.stop_strings else None,
        logprobs=0 if plan.log_probs else None,
        extra_args={IDS_ONLY: 1} if plan.buffered else None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    return Request(
        name_of(number),
        [(prompt * 31 + i) % 89 for i in range(length)],
        params,
        None,
        client_index=number % 2,
        arrival_time=float(number),
        lora_request=LoRARequest("one", 1 + number % 2, "/adapter") if plan.adapters else None,
        priority=number % 3 if plan.priorities else 0,
        block_hasher=hasher,
        resumable=plan.resumable and number == 0,
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


def state(scheduler: Scheduler) -> tuple[Any, ...]:
    """All that the next steps depend on."""
    pool = scheduler.kv_cache_manager.block_pool
    requests = [
        (
            name,
            one.status,
            one.num_tokens,
            one.num_computed_tokens,
            one.num_output_placeholders,
            one.num_in_flight_tokens,
            one.is_prefill_chunk,
            len(one.block_hashes),
            scheduler.kv_cache_manager.get_block_ids(name),
        )
        for name, one in scheduler.requests.items()
    ]
    return (
        requests,
        [one.request_id for one in scheduler.running],
        [one.request_id for one in scheduler.waiting],
        scheduler.current_step,
        scheduler.pause_state,
        scheduler.max_num_scheduled_tokens,
        scheduler.prefill_capacity_bound,
        set(scheduler.prev_step_scheduled_req_ids),
        set(scheduler.finished_req_ids),
        [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        len(getattr(pool.cached_block_hash_to_block, "_cache", ())),
    )


def play(model: str, plan: Plan) -> tuple[list[SchedulerOutput], list[Any]]:
    """The scheduler's decision in each step, and all that it sent and knew after it."""
    scheduler, decided, history, waiting = scheduler_of(model, plan), list[Any](), list[Any](), deque[Any]()
    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    hasher = get_request_block_hasher(BLOCK, function) if plan.prefix_caching else None
    for step in range(900):
        for number, (arrival, *_) in enumerate(plan.arrivals):
            if arrival == step:
                scheduler.add_request(request_of(plan, number, hasher))
        for at, number in (*plan.aborts, *([(100, 0)] if plan.resumable else [])):  # else it keeps its seat
            if at == step and name_of(number) in scheduler.requests:
                scheduler.finish_requests([name_of(number)], RequestStatus.FINISHED_ABORTED)
        for at, steps, paused in plan.pauses:
            if step in (at, at + steps):
                scheduler.set_pause_state(paused if step == at else PauseState.UNPAUSED)
        if step in plan.resets and not plan.resumable:  # the blocks of one that waits for its prompt stay in use
            scheduler.reset_prefix_cache(reset_running_requests=True)
        if step in plan.versions:
            EngineCoreProc.publish_for_test(None, step)
        in_flight = any(one.num_scheduled_tokens for one, _ in waiting)
        if step > 70 and not scheduler.has_unfinished_requests() and not in_flight:
            break
        scheduled = scheduler.schedule(throttle_prefills=step % plan.throttled > 0)
        decided.append(copy.deepcopy(scheduled))
        history.append(state(scheduler))
        waiting.append((scheduled, answer(scheduler, scheduled, log_probs=plan.log_probs)))
        if len(waiting) == plan.in_flight or not scheduled.num_scheduled_tokens:
            outputs = scheduler.update_from_output(*waiting.popleft())
            sent = {index: [message(one) for one in client.outputs] for index, client in outputs.items()}
            history.append({index: messages for index, messages in sent.items() if messages})
            history.append([client.scheduler_stats for client in outputs.values() if client.scheduler_stats])
            history.append(state(scheduler))
    else:
        pytest.fail("The requests do not end.")
    return decided, history


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
# A seat gets free in a throttled step, and vLLM has noted that a prompt waits: it computes the prompt at once.
@example(plan=Plan(((0, 30, 30, 0), (0, 10, 60, 1), (10, 40, 10, 2)), seats=2, throttled=3))
# A request that had room for a token is computed again in two parts, of which the second has one token.
@example(plan=Plan(((0, 50, 30, 1),), resets=(16,)))
@given(plan=plans)
def test_every_step_is_vllms_own(model: str, plan: Plan) -> None:
    assert BUFFERING.check()
    assert DECODING.check()
    with engine_core(shortcuts=False):
        stock = play(model, plan)
    with engine_core(shortcuts=True):
        short = play(model, plan)
    assert short == stock


def short_steps(model: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The numbers of steps with tokens that vLLM did not schedule, and that it did."""
    original, by_vllm = Scheduler._update_after_schedule, list[bool]()

    def update(self: Any, scheduled: Any) -> None:
        by_vllm.append(bool(scheduled.num_scheduled_tokens))
        original(self, scheduled)

    monkeypatch.setattr(Scheduler, "_update_after_schedule", update)
    with engine_core(shortcuts=True):
        decided, _ = play(model, plan)
    ours = [bool(one.num_scheduled_tokens) and not stock for one, stock in zip(decided, by_vllm, strict=True)]
    return sum(ours), sum(by_vllm)


TWO = ((0, 30, 60, 0), (0, 30, 60, 1))


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(
    ("name", "plan", "stock"),
    [
        ("the prompts", Plan(TWO), 1),
        ("chunks of two prompts", Plan(((0, 100, 20, 0), (0, 100, 20, 1))), 4),
        ("a later prompt", Plan((*TWO, (20, 20, 10, 2))), 2),
        ("prompts that wait for a seat", Plan((*TWO, (0, 20, 10, 2)), seats=2), 2),
        ("a pause", Plan(TWO, pauses=((10, 5, PauseState.PAUSED_ALL),)), 2),  # the first step after it
        ("a pause, V2 model runner", Plan(TWO, pauses=((10, 5, PauseState.PAUSED_ALL),), v2_runner=True), 1),
        ("steps without new requests", Plan(TWO, pauses=((10, 5, PauseState.PAUSED_NEW),)), 6),
        ("a reset", Plan(TWO, resets=(10,)), 3),  # two chunks
        ("an abort", Plan(TWO, aborts=((10, 0),)), 1),
        ("throttled steps", Plan(TWO, throttled=3), 41),
        ("a resumable request", Plan(TWO, resumable=True), 60),
        ("a sliding window", Plan(TWO, sliding_window=True), 60),
        ("an adapter that does not fit", Plan(TWO, adapters=True), 61),
    ],
)
def test_vllm_schedules_what_it_has_to_decide_and_nothing_else(
    model: str, monkeypatch: pytest.MonkeyPatch, name: str, plan: Plan, stock: int, in_flight: int
) -> None:
    ours, by_vllm = short_steps(model, dataclasses.replace(plan, in_flight=in_flight), monkeypatch)
    assert (name, by_vllm) == (name, stock)
    assert ours > 0 or name in ("a resumable request", "a sliding window")


def test_most_tokens_take_the_shortcuts_and_preemptions_remain(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

    arrivals = tuple((0, 30, 60, number) for number in range(3))
    plan = Plan(arrivals, num_blocks=9)
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
        stock = play(model, plan)
    without, calls = calls, {}
    with engine_core(shortcuts=True):
        short = play(model, plan)
    assert any(one.preempted_req_ids for one in stock[0])
    assert short == stock
    assert 0 < calls["allocate_new_blocks"] < without["allocate_new_blocks"] / 5
    # Those of preempted requests, and those that end a request or complete a message.
    assert 0 < calls["_update_request_with_output"] < without["_update_request_with_output"] / 2


@pytest.mark.parametrize("stop_strings", [True, False])
def test_a_request_with_stop_strings_sends_every_token(model: str, stop_strings: bool) -> None:
    """The front end makes text of them and ends the request; of others, 32 go at a time, or all at the end."""
    with engine_core(shortcuts=True):
        _, history = play(model, Plan(((0, 5, 15, 0),), in_flight=1, stop_strings=stop_strings))
    sent = [each for each in history if isinstance(each, dict)]
    messages = [len(ids) for clients in sent for client in clients.values() for _, ids, *_ in client]
    assert messages == ([1] * 15 if stop_strings else [1, 14])
