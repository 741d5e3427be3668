"""Measures and verifies weight pushes into one vLLM server that starts with random weights.

    python -m benchmarks.weight_sync.push --device cpu --model 126m
    python -m benchmarks.weight_sync.push --device cuda --model 0.6b --transport ipc shm --one-by-one
    python -m benchmarks.weight_sync.push --device cuda --model 0.6b --transport nccl --server-gpu 1 \
        --one-by-one --vllm nccl-packed nccl
    torchrun --nproc-per-node 2 -m benchmarks.weight_sync.push --device cuda --model 0.6b --zero-stage 3
    torchrun --nproc-per-node 2 -m benchmarks.weight_sync.push --device cpu --model tiny --zero-stage 3
    torchrun --nproc-per-node 1 -m benchmarks.weight_sync.push --device cuda --model 0.6b --zero-stage 3 \
        --transport ipc --vllm ipc-packed

Prints one line per transport: best and median seconds with their phases, GB/s, and the log-prob difference between
trainer and server on random tokens after the push. Before timing, one push with ``verify`` compares every byte.
``--one-by-one`` repeats each transport with one parameter per bucket; ``--vllm`` times vLLM's own engines (GPUs only),
each in a separate server; from one rank of ZeRO they read examples/zero3_weight_source.py's source, first in buckets,
then gathered one parameter at a time.
"""

import argparse
import contextlib
import ctypes
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist

from benchmarks.runs import free_port
from benchmarks.weight_sync import vllm_engines
from rollout_vllm.servers.command import inherited_environment
from weight_sync import ModuleSource, SyncConfig, SyncReport, WeightPusher, ZeroSource, server_args, server_env

Transport = Literal["auto", "shm", "ipc", "nccl", "tcp"]

# (hidden, intermediate, layers, vocabulary, heads, key/value heads, head size, tied)
SHAPES: dict[str, tuple[int, int, int, int, int, int, int, bool]] = {
    "tiny": (128, 256, 2, 64, 4, 2, 32, True),
    "126m": (768, 2048, 12, 50304, 12, 12, 64, True),
    "0.6b": (1024, 3072, 28, 151936, 16, 8, 128, True),
    "7b": (4096, 11008, 32, 151936, 32, 8, 128, False),
}


def main() -> None:
    """Measure one model shape with the given transports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=SHAPES, default="126m")
    parser.add_argument("--transport", nargs="*", choices=("shm", "ipc", "nccl", "tcp"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--bucket-mib", type=int, nargs="+", default=[None], help="one or more sizes")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--server-gpu", default="0", help="CUDA_VISIBLE_DEVICES of the server")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--one-by-one", action="store_true", help="also one parameter per bucket")
    parser.add_argument("--vllm", nargs="*", default=[], choices=vllm_engines.NAMES, help="vLLM's own engines")
    parser.add_argument("--zero-stage", type=int, choices=(1, 2, 3), help="push from ZeRO; needs torchrun")
    args = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2) if args.device == "cpu" else 8)
    if args.vllm and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("--vllm sends from one process; start it with --nproc-per-node 1")
    config = model_config(args.model)
    trainer = zero_trainer if args.zero_stage else plain_trainer
    with trainer(config, args) as (source, model, rank), contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = [(name, *kind) for name in args.vllm for kind in engine_sources(model, args).items()]
        started = [
            stack.enter_context(server(config, args, folder, name))
            for name in ("", *(name for name, _, _ in engines))
            if rank == 0
        ]  # all at once: they take a minute, and those that wait do nothing
        endpoint = started[0].ready() if started else None
        if args.zero_stage:
            dist.barrier()
        for transport in args.transport or (["shm"] if args.device == "cpu" else ["ipc", "shm"]):
            measure(source, model, endpoint, transport, args, rank)
        for (name, kind, weights), one in zip(engines, started[1:], strict=True):
            time_engine(weights, model, one.ready(), f"{name}{kind}", args)


def engine_sources(model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Settings that vLLM's engines read, by a name for the table."""
    if not args.zero_stage:
        from vllm.distributed.weight_transfer.base import ModuleSource as VllmSource

        return {"": VllmSource(model)}
    from examples.zero3_weight_source import GatheringSource, ZeroWeightSource

    bucketed = ZeroWeightSource(model, torch.device(args.device))
    return {", ZeRO in buckets": bucketed, ", ZeRO one by one": GatheringSource(model)}


Trainer = tuple[Any, Any, int]


@contextlib.contextmanager
def plain_trainer(config: Any, args: argparse.Namespace) -> Iterator[Trainer]:
    """One process with the full model: its source, the model, rank 0."""
    model = build(config, args.dtype, args.device)
    yield ModuleSource(model), model, 0


@contextlib.contextmanager
def zero_trainer(config: Any, args: argparse.Namespace) -> Iterator[Trainer]:
    """One rank of a DeepSpeed engine. Log-probs are compared with one rank alone; the bytes are always verified."""
    import deepspeed
    import transformers

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # not needed, and would be compiled
    rank = int(os.environ["RANK"])
    if args.device == "cuda":
        args.device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    deepspeed.init_distributed("nccl" if args.device != "cpu" else "gloo", verbose=False)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": args.zero_stage},
        "bf16": {"enabled": args.dtype == "bfloat16"},
        "zero_allow_untested_optimizer": True,
    }
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    try:
        engine.eval()
        yield ZeroSource(engine.module), engine.module if dist.get_world_size() == 1 else None, rank
    finally:
        dist.destroy_process_group()


def model_config(name: str) -> Any:
    """The transformers config of a shape."""
    import transformers

    hidden, intermediate, layers, vocab, heads, kv_heads, head_dim, tied = SHAPES[name]
    return transformers.Qwen3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        vocab_size=vocab,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        max_position_embeddings=1024,
        architectures=["Qwen3ForCausalLM"],
    )


def build(config: Any, dtype: str, device: str) -> Any:
    """Random weights on the trainer's device, without gradients: vLLM's engines reject tensors that require them."""
    import transformers

    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    return model.eval().requires_grad_(False)


class OneByOne(SyncConfig):
    """One parameter per bucket."""

    def bucket_bytes(self, transport: str, default_mib: int) -> int:
        """The smallest bound."""
        return 1


def measure(source: Any, model: Any, endpoint: Any, transport: Transport, args: argparse.Namespace, rank: int) -> None:
    """Verify once, time the repeats with each bucket size, compare log-probs, and print. Runs on every rank."""
    config = SyncConfig(verify=True, transport=transport, bucket_mib=args.bucket_mib[0])
    with WeightPusher(source, [endpoint], config, rank=rank, device=args.device) as pusher:
        verified = pusher.push(0).total_s
        report(rank, f"{transport}: verified byte for byte in {verified:.2f} s")
    cases = [(transport + (f", {size} MiB per bucket" if size else ""), SyncConfig, size) for size in args.bucket_mib]
    if args.one_by_one:
        cases.append((f"{transport}, one by one", OneByOne, None))
    for name, kind, size in cases:
        config = kind(transport=transport, bucket_mib=size)
        with WeightPusher(source, [endpoint], config, rank=rank, device=args.device) as pusher:
            first = pusher.push(1)
            reports = [pusher.push(2 + i) for i in range(args.repeats)]
        report(rank, describe(name, first, reports))
    if model is not None:
        report(rank, f"{transport}: mean absolute log-prob difference {log_prob_difference(model, endpoint):.2e}")


def report(rank: int, text: str) -> None:
    """Print on rank 0."""
    if rank == 0:
        print(text, flush=True)


def describe(name: str, first: SyncReport, reports: list[SyncReport]) -> str:
    """First, best and median push with their phases."""
    best = min(reports, key=lambda r: r.total_s)
    parts = ("total_s", "pause_s", "gather_s", "transfer_s", "finish_s")
    median = {part: statistics.median(getattr(r, part) for r in reports) for part in parts}
    return (
        f"{name}: {best.num_bytes / 1e9:.3f} GB in {best.num_tensors} tensors; first {first.total_s:.3f} s; "
        f"best {best.total_s:.3f} s = {best.num_bytes / 1e9 / best.total_s:.2f} GB/s "
        f"(transfer alone {best.num_bytes / 1e9 / best.transfer_s:.2f} GB/s); median "
        + ", ".join(f"{part.removesuffix('_s')} {1000 * median[part]:.0f} ms" for part in parts)
    )


def time_engine(source: Any, model: Any, endpoint: Any, name: str, args: argparse.Namespace) -> None:
    """Time vLLM's own engine, named before a comma, including pause and resume."""
    seconds = []
    with vllm_engines.engine(name.partition(",")[0], source, endpoint.url, args.tensor_parallel) as send:
        for _ in range(1 + args.repeats):
            start = time.perf_counter()
            call(endpoint, "POST", "/pause?mode=wait")
            send()
            call(endpoint, "POST", "/reset_prefix_cache")
            call(endpoint, "POST", "/resume")
            seconds.append(time.perf_counter() - start)
    first, *rest = seconds
    print(
        f"vLLM {name}: first {first:.3f} s; best {min(rest):.3f} s; median {1000 * statistics.median(rest):.0f} ms; "
        f"mean absolute log-prob difference {log_prob_difference(model, endpoint):.2e}",
        flush=True,
    )


@torch.no_grad()
def log_prob_difference(model: Any, endpoint: Any) -> float:
    """Mean absolute log-prob difference of trainer and server on the server's greedy response to a random prompt."""
    vocab = model.config.vocab_size
    prompt = torch.randint(0, vocab, (64,), generator=torch.Generator().manual_seed(1)).tolist()
    body = {"model": "policy", "prompt": prompt, "max_tokens": 32, "temperature": 0.0, "logprobs": 1}
    body |= {"return_token_ids": True, "ignore_eos": True}
    choice = call(endpoint, "POST", "/v1/completions", body)["choices"][0]
    response = choice["token_ids"]
    ids = torch.tensor([[*prompt, *response]], device=model.device)
    log_probs = model(ids).logits[0].float().log_softmax(-1)
    ours = [float(log_probs[len(prompt) - 1 + i, token]) for i, token in enumerate(response)]
    pairs = zip(ours, choice["logprobs"]["token_logprobs"], strict=True)
    return float(statistics.mean(abs(a - b) for a, b in pairs))


@dataclass(frozen=True)
class Server:
    """A server that was started."""

    endpoint: Any
    process: "subprocess.Popen[bytes]"
    log: Path

    def ready(self) -> Any:
        """Its endpoint, when it answers."""
        wait_healthy(self.endpoint, self.process, self.log)
        return self.endpoint


@contextlib.contextmanager
def server(config: Any, args: argparse.Namespace, parent: Path, vllm_engine: str = "") -> Iterator[Server]:
    """A vLLM server with dummy weights and a word-level tokenizer, for weight_sync or one of vLLM's own engines."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = Path(tempfile.mkdtemp(dir=parent))
    config.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(config.vocab_size)}, unk_token="w1"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0").save_pretrained(folder)
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", args.dtype, "--load-format", "dummy"]
    command += ["--served-model-name", "policy", "--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager"]
    command += ["--tensor-parallel-size", str(args.tensor_parallel)]
    kind = "cpu" if args.device == "cpu" else "cuda"
    command += vllm_engines.server_args(vllm_engine) or server_args()
    env = {**inherited_environment(os.environ), **server_env(kind), "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if vllm_engine else {}  # its IPC handles are pickled
    if args.device == "cpu":
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        env |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
        # As in rollout_vllm: the worker runs in the engine's process, else both busy-wait for each other's messages.
        env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if args.tensor_parallel == 1 else {}
    else:
        command += ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(2**30)]
        env |= {"CUDA_VISIBLE_DEVICES": args.server_gpu, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    endpoint = SimpleNamespace(url=f"http://127.0.0.1:{port}", api_key=None)
    log = folder / "server.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, env=env, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_die_too
        )
    try:
        yield Server(endpoint, process, log)
    except BaseException:
        print(log.read_text()[-4000:], file=sys.stderr)
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def wait_healthy(endpoint: Any, process: subprocess.Popen[bytes], log: Path, timeout_s: float = 500.0) -> None:
    """Wait until the server answers."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            call(endpoint, "GET", "/v1/models")
            return
        time.sleep(0.2)
    raise RuntimeError(f"server did not start, see {log}")


def call(endpoint: Any, method: str, path: str, body: Any = None) -> Any:
    """One HTTP call, decoded."""
    host, _, port = endpoint.url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    headers = {"Content-Type": "application/json"}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    if response.status != 200:
        raise RuntimeError(data.decode(errors="replace"))
    return json.loads(data) if data else None


def _die_too() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    main()
