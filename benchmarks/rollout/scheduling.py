"""Engine core's Python of a decoding step, stock and short: `python -m benchmarks.rollout.scheduling`.

Drives vLLM's own AsyncScheduler without a model or a server: `--requests` requests of 297 prompt tokens in groups of 4
with the same prompt, random tokens, two steps in flight as on a GPU. Both ways buffer tokens as rollout servers do
(`servers/fast/buffering`). "Short" adds what shortens a step: vLLM looks neither for KV-cache blocks that a token does
not need (`servers/fast/decoding`) nor at tokens that are only buffered. Both must decide and send the same.
"""

import argparse
import gc
import io
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.random_model import model_config
from rollout_vllm.servers.fast.buffering import buffer_in_engine_core
from rollout_vllm.servers.fast.decoding import skip_needless_block_searches
from rollout_vllm.servers.patch import BUFFERING, DECODING, IDS_ONLY
from rollout_vllm.servers.policy_versions import PUBLISH

CALLS = ("schedule", "update_from_output")
PROMPT, GROUP, BLOCK = 297, 4, 16  # tokens, requests, tokens
VOCAB, EOS = 151936, 2


@dataclass(frozen=True)
class Round:
    """ms: CPU milliseconds of each measured step, by call. history: hashes of what every step decided and sent.

    They include how many blocks of the KV cache are free and how many the prefix cache has.
    """

    ms: dict[str, list[float]]
    history: list[int]


def configuration(folder: Path, *, requests: int, steps: int) -> Any:
    """vLLM's configuration of a model whose folder, without weights, is written to `folder`.

    No request ends within `steps` steps in which all decode.
    """
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig

    model_config("qwen3-0.6b", architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
    prompts, model = 8192, str(folder)  # most tokens of prompts per step
    length = PROMPT + PROMPT * requests // prompts + steps + 8
    return VllmConfig(
        model_config=ModelConfig(model=model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=length),
        scheduler_config=SchedulerConfig(
            max_num_seqs=requests,
            max_num_batched_tokens=prompts + requests,
            max_model_len=length,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=True,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        device_config=DeviceConfig(device="cpu"),
    )


def scheduler_of(config: Any, *, requests: int) -> Any:
    """A scheduler to which all requests were added, in the state of one whose worker is a GPU."""
    import torch
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    length = config.model_config.max_model_len
    blocks = requests * (length // BLOCK + 1) + 1
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    scheduler = AsyncScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )
    scheduler.use_v2_model_runner = True
    function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(function)
    hasher = get_request_block_hasher(BLOCK, function)
    for number in range(requests):
        params = SamplingParams(
            max_tokens=length - PROMPT,
            logprobs=0,
            extra_args={IDS_ONLY: 1},
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        params.update_from_generation_config({}, EOS)
        prompt = random.Random(number // GROUP).choices(range(EOS + 1, VOCAB), k=PROMPT)
        scheduler.add_request(Request(f"cmpl-{number}", prompt, params, None, block_hasher=hasher))
    return scheduler


def answer(scheduler: Any, scheduled: Any, chooser: Any) -> Any:
    """A random token, which ends no request, and its log-prob for each request whose prompt is complete."""
    import numpy
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    names = list(scheduled.num_scheduled_tokens)
    drawn = chooser.integers(EOS + 1, VOCAB, len(names)).tolist()
    tokens = [
        [] if scheduler.requests[name].is_prefill_chunk else [token] for name, token in zip(names, drawn, strict=True)
    ]
    column = -chooser.random((len(names), 1), numpy.float32)
    empty = numpy.zeros((len(names), 1), numpy.int32)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: row for row, name in enumerate(names)},
        sampled_token_ids=tokens,
        logprobs=LogprobsLists(empty, column, empty[:, 0], None),
    )


def decided(scheduled: Any) -> tuple[Any, ...]:
    """Message of a step to the worker."""
    new = [(one.req_id, one.block_ids, one.num_computed_tokens) for one in scheduled.scheduled_new_reqs]
    tokens, shared = list(scheduled.num_scheduled_tokens.items()), scheduled.num_common_prefix_blocks
    return tokens, repr(scheduled.scheduled_cached_reqs), new, shared


def sent(per_client: dict[int, Any]) -> list[tuple[Any, ...]]:
    """Message of a step to the front end: tokens of requests, with policy versions and log-probs."""
    measured = [(one, one.new_logprobs) for outputs in per_client.values() for one in outputs.outputs]
    return [
        (one.request_id, one.new_token_ids, values.logprob_token_ids.tolist(), values.logprobs.tolist())
        for one, values in measured
    ]


def play(config: Any, *, requests: int, steps: int) -> Round:
    """Measure `steps` steps in which all requests decode, after the steps that compute their prompts."""
    import numpy

    scheduler, chooser = scheduler_of(config, requests=requests), numpy.random.default_rng(0)
    ms: dict[str, list[float]] = {call: [] for call in CALLS}
    history, in_flight, prefills = list[int](), deque[Any](), 0

    def timed(call: str, *arguments: Any) -> Any:
        begin = time.thread_time()  # other load on the machine does not count
        result = getattr(scheduler, call)(*arguments)
        ms[call].append(1e3 * (time.thread_time() - begin))
        return result

    def note(*facts: Any) -> None:
        pool = scheduler.kv_cache_manager.block_pool
        history.append(hash(repr((facts, pool.get_num_free_blocks(), len(pool.cached_block_hash_to_block)))))

    gc.collect()
    gc.freeze()  # as the engine core
    while len(ms["update_from_output"]) < prefills + steps:
        scheduled = timed("schedule")
        note(decided(scheduled))
        prefills += scheduled.total_num_scheduled_tokens > requests or len(scheduled.num_scheduled_tokens) < requests
        in_flight.append((scheduled, answer(scheduler, scheduled, chooser)))
        if len(in_flight) == 2:
            note(sent(timed("update_from_output", *in_flight.popleft())))
    gc.unfreeze()
    note([(name, list(request.output_token_ids)) for name, request in scheduler.requests.items()])
    assert len(scheduler.requests) == requests, "a request has ended"
    return Round({call: spent[prefills : prefills + steps] for call, spent in ms.items()}, history)


@contextmanager
def installed(*, short: bool) -> Iterator[None]:
    """Buffer tokens as a rollout server's engine core does; `short`: with what shortens scheduling and update."""
    undo = buffer_in_engine_core(BUFFERING.replace, IDS_ONLY, PUBLISH, notes_tokens=short)
    undo += skip_needless_block_searches(DECODING.replace) if short else []
    try:
        with redirect_stdout(io.StringIO()):  # the patches name themselves at their first call
            yield
    finally:
        for restore in undo:
            restore()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200, help="measured steps of a round")
    parser.add_argument("--rounds", type=int, default=5, help="of both ways in turns; the median round is reported")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # without a GPU vLLM refuses it; `scheduler_of` turns it on
    import vllm
    from vllm.envs import enable_envs_cache

    if problem := BUFFERING.problem() or DECODING.problem():
        sys.exit(problem)
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(Path(folder), requests=args.requests, steps=args.steps)
        enable_envs_cache()  # as the engine core
        rounds: dict[bool, list[Round]] = {False: [], True: []}
        for _ in range(args.rounds):
            for short, played in rounds.items():
                with installed(short=short):
                    played.append(play(config, requests=args.requests, steps=args.steps))
    stock = rounds[False][0].history
    for short, played in rounds.items():
        assert all(one.history == stock for one in played), f"a round with {short=} decided or sent something else"
    print(f"{args.requests} requests, {args.steps} steps, median and range of {args.rounds} rounds")
    print("| vLLM, Python | call | stock, ms per step | short, ms per step | short / stock |\n|" + " --- |" * 5)
    versions = f"{vllm.__version__}, {platform.python_version()}"
    for name, calls in (*((call, (call,)) for call in CALLS), ("both", CALLS)):
        spent = [[mean_ms(one, calls) for one in played] for played in rounds.values()]
        cells = [f"{statistics.median(means):.2f} ({min(means):.2f}-{max(means):.2f})" for means in spent]
        ratio = statistics.median(spent[1]) / statistics.median(spent[0])
        print(f"| {versions} | {name} | {cells[0]} | {cells[1]} | {ratio:.2f} |")


def mean_ms(played: Round, calls: tuple[str, ...]) -> float:
    """Of a step, not the median: once in 16 steps a request needs a block, once in 32 its tokens are sent."""
    return sum(statistics.fmean(played.ms[call]) for call in calls)


if __name__ == "__main__":
    main()
