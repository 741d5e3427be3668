"""Slowdown of servers that share one host: `python -m benchmarks.rollout.several_servers --num-servers 2`.

Each server has a GPU. First one server generates alone, then all of them at the same time with as many requests each;
then again with each server's processes on cores of their own. The weights are random, so nothing is downloaded.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import psutil

from benchmarks.random_model import CONFIGS, write_random_model
from rollout_vllm import Endpoint, Request, RolloutClient, RolloutConfig, SamplingConfig, ServerGroup


def rounds(endpoints: Sequence[Endpoint], args: argparse.Namespace) -> list[float]:
    """Seconds of each round of `--requests` requests for each of the servers."""
    config = RolloutConfig(max_samples_in_flight=args.requests)
    sampling = SamplingConfig(n=args.n, max_tokens=args.tokens, ignore_eos=True)
    spent = []
    with RolloutClient(endpoints, config) as client:
        for number in range(args.rounds + 1):
            asked = [
                Request(prompt_id=f"{number} {i}", prompt_ids=[1 + i % 250, 1 + i // 250, *[7] * 254], seed=i)
                for i in range(len(endpoints) * args.requests // args.n)
            ]
            begin = time.perf_counter()
            assert all(group.complete for group in client.generate_blocking(asked, sampling))
            spent.append(time.perf_counter() - begin)
    return spent[1:]


def pin(servers: ServerGroup, cores: Sequence[Collection[int]]) -> None:
    """Keep each server's processes, with all of their threads, on its `cores`."""
    for own, endpoint in zip(cores, servers.endpoints, strict=True):
        port = endpoint.url.rpartition(":")[2]
        for process in psutil.process_iter(["cmdline"]):
            if "--port" in (line := process.info["cmdline"] or []) and line[line.index("--port") + 1] == port:
                for each in (process, *process.children(recursive=True)):
                    for thread in each.threads():
                        os.sched_setaffinity(thread.id, own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-servers", type=int, default=2)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3-0.6b")
    parser.add_argument("--requests", type=int, default=256, help="samples per server")
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    settings = {"enforce_eager": False, "gpu_memory_utilization": 0.5, "max_model_len": 256 + args.tokens}
    config = RolloutConfig(num_servers=args.num_servers, startup_timeout_s=1200.0, **settings)
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(args.model, Path(folder) / "model")
        gpus = [[index] for index in range(args.num_servers)]
        with ServerGroup.launch(model, config, log_dir=Path(folder), gpu_ids_per_server=gpus) as servers:
            servers.wait_ready()
            every = sorted(os.sched_getaffinity(0))
            half = len(every) // args.num_servers
            measured = {f"server {i} alone": rounds([e], args) for i, e in enumerate(servers.endpoints)}
            measured["all at the same time"] = rounds(servers.endpoints, args)
            for count in (half, 4):
                pin(servers, [every[i * count : (i + 1) * count] for i in range(args.num_servers)])
                measured[f"all, {count} cores each"] = rounds(servers.endpoints, args)
    print(f"{args.model}, {args.requests} samples of 256+{args.tokens} tokens per server, {os.cpu_count()} cores")
    print("| | median s | range s |\n| --- | --- | --- |")
    for name, spent in measured.items():
        print(f"| {name} | {statistics.median(spent):.2f} | {min(spent):.2f}-{max(spent):.2f} |")


if __name__ == "__main__":
    main()
