"""Python of a decoding step in vLLM's scheduler: `python -m benchmarks.rollout.scheduling`. No model and no GPU.

Requests of `--tokens` tokens run at the same time, `--n` for each prompt, and every token is made up. Printed is the
CPU time of `schedule` and `update_from_output` in steps in which every request decodes, once as in vLLM and once as in
rollout servers. In a server, the engine core spends it in every step, beside launching the model.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.random_model import write_random_model
from benchmarks.runs import table_header, table_row
from rollout_vllm.servers import patch
from rollout_vllm.servers.fast import buffering, decoding

BLOCK = 16
IN_FLIGHT = 2  # steps, as on a GPU
CONTESTANTS = ("vLLM", "rollout servers")


def scheduler(model: Path, args: argparse.Namespace) -> AsyncScheduler:
    """vLLM's scheduler with all requests waiting, and room for their tokens."""
    length = args.prompt_tokens + args.tokens
    num_blocks = args.requests * (length // BLOCK + 2)
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=length + 1),
        scheduler_config=SchedulerConfig(
            max_num_seqs=args.requests,
            max_num_batched_tokens=8192,
            max_model_len=length + 1,
            is_encoder_decoder=False,
            async_scheduling=True,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        device_config=DeviceConfig(device="cpu"),
    )
    config.cache_config.num_gpu_blocks = num_blocks
    layer = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    made = AsyncScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], layer)]),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )
    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    settings = SamplingParams(
        max_tokens=args.tokens,
        ignore_eos=True,
        logprobs=0,
        extra_args={patch.IDS_ONLY: 1},
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    for number in range(args.requests):
        ids = [(number // args.n * 31 + i) % 89 for i in range(args.prompt_tokens)]
        made.add_request(
            Request(f"cmpl-{number}", ids, settings, None, block_hasher=get_request_block_hasher(BLOCK, function))
        )
    return made


def answer(scheduled: Any) -> ModelRunnerOutput:
    """A token and a log-prob for each request that computes one token or the end of its prompt."""
    names = list(scheduled.num_scheduled_tokens)
    column = numpy.full((len(names), 1), -1.0, numpy.float32)
    lists = LogprobsLists(numpy.zeros_like(column, numpy.int32), column, numpy.zeros(len(names), numpy.int32), None)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: row for row, name in enumerate(names)},
        sampled_token_ids=[[7]] * len(names),
        logprobs=lists,
    )


def replace_parts_of_vllm() -> None:
    """Make this process schedule as the engine core of a rollout server."""
    assert patch.BUFFERING.check()
    assert patch.DECODING.check()
    buffering.buffer_in_engine_core(patch.BUFFERING.replace, patch.IDS_ONLY, "publish_policy_version")
    decoding.skip_needless_block_searches(patch.DECODING.replace)
    decoding.decode_in_short_steps(patch.DECODING.replace)


def measure(contestant: str, model: Path, args: argparse.Namespace) -> list[float]:
    """Milliseconds of a decoding step: median and mean of `schedule`, median and mean of `update_from_output`."""
    if contestant != CONTESTANTS[0]:
        replace_parts_of_vllm()
    core, in_flight = scheduler(model, args), deque[Any]()
    seconds: dict[str, list[float]] = {"schedule": [], "update": []}
    while core.has_unfinished_requests():
        begin = time.thread_time()
        scheduled = core.schedule()
        spent = time.thread_time() - begin
        if scheduled.num_scheduled_tokens:
            in_flight.append((scheduled, answer(scheduled)))
        if len(in_flight) == IN_FLIGHT or not scheduled.num_scheduled_tokens:
            before, output = in_flight.popleft()
            begin = time.thread_time()
            core.update_from_output(before, output)
            if not before.scheduled_new_reqs and len(output.req_ids) == args.requests:
                seconds["schedule"].append(spent)
                seconds["update"].append(time.thread_time() - begin)
    return [1000 * of(part) for part in seconds.values() for of in (statistics.median, statistics.fmean)]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rounds: dict[str, list[list[float]]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        write_random_model("qwen3-tiny", model)
        # In turns, because a processor's pace changes, and each in a process of its own: what is replaced stays so.
        with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
            for _ in range(args.rounds):
                for name, done in rounds.items():
                    done.append(pool.apply(measure, (name, model, args)))
    print(table_header(["ms", "schedule, median step", "mean", "update_from_output, median step", "mean"]))
    for name, done in rounds.items():
        print(table_row([name, *(statistics.median(column) for column in zip(*done, strict=True))]))


if __name__ == "__main__":
    main()
