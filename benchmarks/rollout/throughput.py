"""The client over HTTP compared with `LLM.generate`: `python -m benchmarks.rollout.throughput --device cuda`.

Both run the same model with the same engine settings on the same device, one after the other, and sample the same
number of tokens with log-probs: 256 requests of 256+512 tokens. A final round of `--crowd` concurrent requests measures
the CPU use of the client. The weights are random, so nothing is downloaded.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.random_model import CONFIGS, write_random_model
from rollout_vllm import Request, RolloutClient, RolloutConfig, SamplingConfig, ServerGroup
from rollout_vllm.servers.command import Device, detect_device, server_arguments, server_environment

_MARK = "seconds: "  # vLLM logs to stdout too
# Arguments of the HTTP front end, which `LLM` does not accept: name -> number of values.
_FRONT_END = {"--host": 1, "--port": 1, "--middleware": 1, "--disable-uvicorn-access-log": 0, "--uvicorn-log-level": 1}


def prompts(args: argparse.Namespace, number: int) -> list[list[int]]:
    """Prompts that differ in their first two tokens, so that they share no prefix block."""
    return [[1 + i % 250, 1 + i // 250, *([7] * (args.prompt_tokens - 2))] for i in range(number)]


def rollout_config(args: argparse.Namespace) -> RolloutConfig:
    return RolloutConfig(
        device=args.device,
        dtype="bfloat16",
        max_model_len=args.prompt_tokens + args.tokens,
        max_num_seqs=args.requests,
        gpu_memory_utilization=0.5,
        kv_cache_gib=None if args.device == "cuda" else 1.0,
        enforce_eager=args.device == "cpu",
        max_samples_in_flight=max(args.requests, args.crowd),
        startup_timeout_s=1200.0,
    )


def engine_arguments(args: argparse.Namespace, model: Path) -> list[str]:
    """The server's arguments, without those of the HTTP front end."""
    given, kept = iter(server_arguments(rollout_config(args), str(model), port=1, device=args.device)), []
    for argument in given:
        if argument in _FRONT_END:
            for _ in range(_FRONT_END[argument]):
                next(given)
        else:
            kept.append(argument)
    return kept


def in_process(args: argparse.Namespace, model: Path) -> dict[str, list[float]]:
    """Seconds of each round of LLM.generate in a subprocess, with and without log-probs."""
    config = rollout_config(args)
    device: Device = args.device
    env = server_environment(os.environ, config, device=device, api_key="unused", num_cores=os.cpu_count() or 1)
    env.pop("VLLM_API_KEY")
    task = {"arguments": engine_arguments(args, model), "rounds": args.rounds, "tokens": args.tokens}
    command = [sys.executable, "-m", "benchmarks.rollout.throughput", "--as-llm"]
    done = subprocess.run(
        command,
        input=json.dumps(task | {"prompts": prompts(args, args.requests)}),
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, list[float]] = json.loads(done.stdout.rpartition(_MARK)[2].splitlines()[0])
    return found


def run_llm() -> None:
    """In the subprocess: read the task, time LLM.generate, print the seconds."""
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    task = json.load(sys.stdin)
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(task["arguments"])))
    inputs: Any = [{"prompt_token_ids": ids} for ids in task["prompts"]]
    found: dict[str, list[float]] = {}
    for name, logprobs in (("with", 0), ("without", None)):
        for number in range(task["rounds"] + 1):
            params = [
                SamplingParams(max_tokens=task["tokens"], ignore_eos=True, logprobs=logprobs, seed=1000 * number + i)
                for i in range(len(inputs))
            ]
            begin = time.perf_counter()
            outputs = llm.generate(inputs, params, use_tqdm=False)
            seconds = time.perf_counter() - begin
            assert all(len(output.outputs[0].token_ids) == task["tokens"] for output in outputs)
            if number:  # the first round is a warm-up
                found.setdefault(name, []).append(seconds)
    print(_MARK + json.dumps(found), flush=True)


@dataclass(frozen=True)
class OverHttp:
    """Measurements of the client."""

    seconds: list[float]
    """Of each round."""
    cores: float
    """CPU cores used by the client process."""
    crowd_rate: float
    """tok/s of the round with `--crowd` requests; 0 without it."""
    crowd_cores: float


def over_http(args: argparse.Namespace, model: Path, log_dir: Path) -> OverHttp:
    """Time the rounds of the client, then the round with `--crowd` requests."""
    config = rollout_config(args)
    sampling = SamplingConfig(n=1, max_tokens=args.tokens, ignore_eos=True)

    def timed(client: RolloutClient, number: int, seed: int) -> tuple[float, float]:
        """Return (seconds, CPU seconds of this process) of `number` requests."""
        requests = [
            Request(prompt_id=str(i), prompt_ids=ids, seed=seed + i) for i, ids in enumerate(prompts(args, number))
        ]
        begin, cpu_begin = time.perf_counter(), time.process_time()
        groups = client.generate_blocking(requests, sampling)
        spent = time.perf_counter() - begin, time.process_time() - cpu_begin
        assert all(group.complete for group in groups)
        return spent

    with ServerGroup.launch(model, config, log_dir=log_dir) as servers:
        servers.wait_ready()
        with RolloutClient(servers.endpoints, config) as client:
            spent = [timed(client, args.requests, 10_000 * number) for number in range(args.rounds + 1)][1:]
            crowd = timed(client, args.crowd, 10_000_000) if args.crowd else (0.0, 0.0)
    seconds, cpu = (list(part) for part in zip(*spent, strict=True))
    return OverHttp(
        seconds=seconds,
        cores=sum(cpu) / sum(seconds),
        crowd_rate=args.crowd * args.tokens / crowd[0] if args.crowd else 0.0,
        crowd_cores=crowd[1] / crowd[0] if args.crowd else 0.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default=detect_device()[0])
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3-0.6b")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--crowd", type=int, default=1024, help="requests of the final round; 0: no such round")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(args.model, Path(folder) / "model")
        direct = in_process(args, model)
        http = over_http(args, model, Path(folder))
    total = args.requests * args.tokens
    rates = {
        "LLM.generate, no log-probs": total / statistics.median(direct["without"]),
        "LLM.generate": total / statistics.median(direct["with"]),
        "client over HTTP": total / statistics.median(http.seconds),
    }
    print(
        f"{args.model}, {args.device}, {args.requests} requests of {args.prompt_tokens}+{args.tokens} tokens, ", end=""
    )
    print(f"vLLM {detect_device()[1]}, median of {args.rounds}")
    print("| | tok/s | of LLM.generate |\n| --- | --- | --- |")
    for name, rate in rates.items():
        print(f"| {name} | {rate:.0f} | {rate / rates['LLM.generate']:.1%} |")
    print(f"The client's process used {http.cores:.2f} cores.")
    if args.crowd:
        print(f"{args.crowd} concurrent requests: {http.crowd_rate:.0f} tok/s, {http.crowd_cores:.2f} cores.")


if __name__ == "__main__":
    run_llm() if sys.argv[1:] == ["--as-llm"] else main()
