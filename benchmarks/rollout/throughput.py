"""The client over HTTP compared with `LLM.generate`: `python -m benchmarks.rollout.throughput --device cuda`.

Both run the same model with the same engine settings on the same device, side by side in memory, and generate in turns:
256 requests of 256+512 tokens, with and without log-probs. "stock path" sends the client's requests without the mark
that lets servers buffer tokens. The weights are random, so nothing is downloaded.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Self
from unittest import mock

import numpy as np

from benchmarks.random_model import CONFIGS, write_random_model
from rollout_vllm import Request, RolloutClient, RolloutConfig, SamplingConfig, ServerGroup
from rollout_vllm.client import protocol, request_runner
from rollout_vllm.servers.command import server_arguments, server_environment
from rollout_vllm.servers.device import Device, detect_device

_MARK = "seconds: "  # vLLM logs to stdout too
# Arguments of the HTTP front end, which `LLM` does not accept: name -> number of values.
_FRONT_END = {"--host": 1, "--port": 1, "--middleware": 1, "--disable-uvicorn-access-log": 0, "--uvicorn-log-level": 1}
Round = Callable[[int], float]
"""Generates once with the seeds of a round; returns the seconds."""


def prompts(args: argparse.Namespace, number: int) -> list[list[int]]:
    """Prompts that differ in their first two tokens, so that they share no prefix block."""
    return [[1 + i % 250, 1 + i // 250, *([7] * (args.prompt_tokens - 2))] for i in range(number)]


def rollout_config(args: argparse.Namespace) -> RolloutConfig:
    return RolloutConfig(
        device=args.device,
        dtype="bfloat16",
        max_model_len=args.prompt_tokens + args.tokens,
        max_num_seqs=args.requests,
        gpu_memory_utilization=0.2,
        kv_cache_gib=24.0 if args.device == "cuda" else 1.0,
        enforce_eager=args.device == "cpu",
        max_samples_in_flight=args.requests,
        startup_timeout_s=1200.0,
        extra_args=tuple(args.vllm_args),
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


class Direct:
    """`LLM.generate` in a subprocess."""

    def __init__(self, args: argparse.Namespace, model: Path) -> None:
        task = {"arguments": engine_arguments(args, model), "prompts": prompts(args, args.requests)}
        device: Device = args.device
        config = rollout_config(args)
        full = server_environment(os.environ, config, device=device, api_key="unused", num_cores=os.cpu_count() or 1)
        command = [sys.executable, "-m", "benchmarks.rollout.throughput", "--as-llm"]
        self._log = model.with_name("llm.log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, env=full, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._send(task | {"tokens": args.tokens})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _send(self, task: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()

    def generate(self, number: int, *, logprobs: int | None) -> float:
        """Seconds of one round."""
        self._send({"number": number, "logprobs": logprobs})
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return float(line.removeprefix(_MARK))
        raise RuntimeError(f"LLM.generate ended with code {self._process.wait()}: {self._log.read_text()[-3000:]}")


def run_llm() -> None:
    """In the subprocess: read the task, then answer each round with its seconds."""
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    task = json.loads(sys.stdin.readline())
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(task["arguments"])))
    inputs: Any = [{"prompt_token_ids": ids} for ids in task["prompts"]]
    for line in sys.stdin:
        asked = json.loads(line)
        settings = {"max_tokens": task["tokens"], "ignore_eos": True, "logprobs": asked["logprobs"]}
        params = [SamplingParams(**settings, seed=1000 * asked["number"] + i) for i in range(len(inputs))]
        begin = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        assert all(len(output.outputs[0].token_ids) == task["tokens"] for output in outputs)
        print(f"{_MARK}{seconds}", flush=True)


def over_http(client: RolloutClient, args: argparse.Namespace, number: int, *, n: int = 1) -> float:
    """Seconds of one round, in groups of n."""
    sampling = SamplingConfig(n=n, max_tokens=args.tokens, ignore_eos=True)
    asked = [
        Request(prompt_id=str(i), prompt_ids=ids, seed=10_000 * number + i)
        for i, ids in enumerate(prompts(args, args.requests // n))
    ]
    begin = time.perf_counter()
    groups = client.generate_blocking(asked, sampling)
    seconds = time.perf_counter() - begin
    assert all(group.complete for group in groups)
    return seconds


def stock_path() -> AbstractContextManager[object]:
    """Send requests without the mark of a client that reads only ids and log-probs."""
    marked = protocol.completion_body

    def unmarked(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: value for name, value in marked(*args, **kwargs).items() if name != "vllm_xargs"}

    return mock.patch.object(request_runner, "completion_body", unmarked)


def assert_same_values(client: RolloutClient, args: argparse.Namespace) -> None:
    """The two paths of a server give the same tokens and log-probs."""
    request, sampling = (
        Request(prompt_id="p", prompt_ids=prompts(args, 1)[0], seed=1),
        SamplingConfig(n=1, max_tokens=70),
    )
    client.generate_blocking([request], sampling)  # fills the prefix cache
    [buffered] = client.generate_blocking([request], sampling)[0].samples
    with stock_path():
        [stock] = client.generate_blocking([request], sampling)[0].samples
    same = all(np.array_equal(getattr(buffered, name), getattr(stock, name)) for name in ("response_ids", "log_probs"))
    print("one request, buffered and stock path: " + ("same tokens and log-probs" if same else "DIFFERENT"), flush=True)


def compare(args: argparse.Namespace, folder: Path) -> None:
    model, config = write_random_model(args.model, folder / "model"), rollout_config(args)
    with (
        Direct(args, model) as direct,
        ServerGroup.launch(model, config, log_dir=folder / "logs") as servers,
    ):
        servers.wait_ready()
        with RolloutClient(servers.endpoints, config) as client:
            assert_same_values(client, args)
            http = partial(over_http, client, args)

            def stock(number: int) -> float:
                with stock_path():
                    return http(number)

            contestants: dict[str, Round] = {
                "LLM.generate, no log-probs": partial(direct.generate, logprobs=None),
                "LLM.generate": partial(direct.generate, logprobs=0),
                "client over HTTP, stock path": stock,
                "client over HTTP": http,
                f"client over HTTP, n={args.n}": partial(http, n=args.n),
            }
            seconds: dict[str, list[float]] = {name: [] for name in contestants}
            client_cpu = dict.fromkeys(contestants, 0.0)
            for number in range(args.rounds + 1):  # the first round is a warm-up
                for name, once in contestants.items():
                    cpu = time.process_time()
                    spent = once(number)
                    if number:
                        seconds[name].append(spent)
                        client_cpu[name] += time.process_time() - cpu
            report(args, seconds, client_cpu)


def report(args: argparse.Namespace, seconds: Mapping[str, list[float]], client_cpu: Mapping[str, float]) -> None:
    total, base = args.requests * args.tokens, statistics.median(seconds["LLM.generate, no log-probs"])
    sizes = f"{args.requests} requests of {args.prompt_tokens}+{args.tokens} tokens"
    print(f"{args.model}, {args.device}, {sizes}, vLLM {detect_device()[1]}, {args.rounds} rounds, {args.vllm_args}")
    print("| | median s | range s | tok/s | seconds / LLM.generate without | client cores |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, each in seconds.items():
        median = statistics.median(each)
        cells = [f"{median:.2f}", f"{min(each):.2f}-{max(each):.2f}", f"{total / median:.0f}", f"{median / base:.2f}"]
        print("|", " | ".join([name, *cells, f"{client_cpu[name] / sum(each):.2f}"]), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default=detect_device()[0])
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3-0.6b")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--n", type=int, default=4, help="samples per request of the last contestant")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm-args", type=shlex.split, default=[], help="one string of vLLM arguments, for both")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compare(args, Path(folder))


if __name__ == "__main__":
    run_llm() if sys.argv[1:] == ["--as-llm"] else main()
