"""How long does a push take, and does it arrive? Starts one vLLM server with random weights and pushes other ones.

    python benchmarks/weight_sync/push.py --device cpu --model 126m
    python benchmarks/weight_sync/push.py --device cuda --model 0.6b --transport ipc --transport shm
    python benchmarks/weight_sync/push.py --device cuda --model 0.6b --transport nccl --server-gpu 1

Prints one line a transport: best and median seconds with their parts, GB/s, and the log-prob agreement of trainer and
server on random tokens after the push. Before timing, one push with ``verify`` compares every byte.
"""

import argparse
import contextlib
import ctypes
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from weight_sync import ModuleSource, SyncConfig, WeightPusher, server_args, server_env

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "vocab_size": 64,
        "heads": (4, 2, 32),
    },
    "126m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "vocab_size": 50304,
        "heads": (12, 12, 64),
    },
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "vocab_size": 151936,
        "heads": (16, 8, 128),
    },
    "7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "vocab_size": 151936,
        "heads": (32, 8, 128),
        "tie_word_embeddings": False,
    },
}


def main() -> None:
    """Run one shape over the transports asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=SHAPES, default="126m")
    parser.add_argument("--transport", action="append", choices=("shm", "ipc", "nccl", "tcp"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--server-gpu", default="0", help="CUDA_VISIBLE_DEVICES of the server")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--no-checksum", action="store_true")
    parser.add_argument("--skip-verify", action="store_true")
    parser.add_argument("--server-arg", action="append", default=[])
    args = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2) if args.device == "cpu" else 8)
    config = model_config(args.model)
    model = build(config, args.dtype, args.device)
    with tempfile.TemporaryDirectory() as folder, server(config, args, Path(folder)) as endpoint:
        for transport in args.transport or (["shm"] if args.device == "cpu" else ["ipc", "shm"]):
            measure(model, endpoint, transport, args)


def model_config(name: str) -> Any:
    """The transformers config of a shape."""
    import transformers

    shape = dict(SHAPES[name])
    heads, kv_heads, head_dim = shape.pop("heads")
    shape = {"tie_word_embeddings": True, "max_position_embeddings": 1024, **shape}
    return transformers.Qwen3Config(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        architectures=["Qwen3ForCausalLM"],
        **shape,
    )


def build(config: Any, dtype: str, device: str) -> Any:
    """Random weights on the trainer's device."""
    import transformers

    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def measure(model: Any, endpoint: Any, transport: str, args: argparse.Namespace) -> None:
    """Verify once, time the repeats, compare log-probs, print."""
    settings: dict[str, Any] = {"transport": transport, "bucket_mib": args.bucket_mib}
    if not args.skip_verify:
        with WeightPusher(
            ModuleSource(model), [endpoint], SyncConfig(verify=True, **settings), device=args.device
        ) as p:
            verified = p.push(0).total_s
            print(f"{transport}: verified byte for byte in {verified:.2f} s", flush=True)
    config = SyncConfig(checksum=not args.no_checksum, **settings)
    with WeightPusher(ModuleSource(model), [endpoint], config, device=args.device) as pusher:
        first = pusher.push(1)
        reports = [pusher.push(2 + i) for i in range(args.repeats)]
    best = min(reports, key=lambda r: r.total_s)
    parts = ("total_s", "pause_s", "gather_s", "transfer_s", "finish_s")
    median = {part: statistics.median(getattr(r, part) for r in reports) for part in parts}
    print(
        f"{transport}: {best.num_bytes / 1e9:.3f} GB in {best.num_tensors} tensors; first {first.total_s:.3f} s; "
        f"best {best.total_s:.3f} s = {best.num_bytes / 1e9 / best.total_s:.2f} GB/s "
        f"(transfer alone {best.num_bytes / 1e9 / best.transfer_s:.2f} GB/s); median "
        + ", ".join(f"{part.removesuffix('_s')} {1000 * median[part]:.0f} ms" for part in parts),
        flush=True,
    )
    print(f"{transport}: mean absolute log-prob difference {log_prob_difference(model, endpoint):.2e}", flush=True)


@torch.no_grad()
def log_prob_difference(model: Any, endpoint: Any) -> float:
    """Trainer and server on the same random prompt: the tokens the server samples, greedily."""
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
    return statistics.mean(abs(a - b) for a, b in pairs)


@contextlib.contextmanager
def server(config: Any, args: argparse.Namespace, folder: Path) -> Iterator[Any]:
    """A vLLM server with dummy weights and a word-level tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    config.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(config.vocab_size)}, unk_token="w1"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0").save_pretrained(folder)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    sync = SyncConfig()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", args.dtype, "--load-format", "dummy"]
    command += ["--served-model-name", "policy", "--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager"]
    command += ["--tensor-parallel-size", str(args.tensor_parallel)]
    command += [*server_args(sync, args.device), *args.server_arg]
    env = {**os.environ, **server_env(sync, args.device), "HF_HUB_OFFLINE": "1"}
    if args.device == "cpu":
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        env |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    else:
        command += ["--gpu-memory-utilization", "0.4"]
        env |= {"CUDA_VISIBLE_DEVICES": args.server_gpu, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    endpoint = SimpleNamespace(url=f"http://127.0.0.1:{port}", api_key=None)
    log = folder / "server.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, env=env, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_die_too
        )
    try:
        wait_healthy(endpoint, process, log)
        yield endpoint
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
    return json.loads(data)


def _die_too() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    main()
