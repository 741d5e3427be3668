"""Tiny models and real vLLM servers for this package's tests."""

import contextlib
import dataclasses
import functools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import plinth_testing as testing
from plinth_base import Endpoint, endpoint
from plinth_base.endpoint import NO_ANSWER
from plinth_testing import NetworkHost, free_port, stop_process, wait_until
from plinth_testing.processes import CPU_ENVIRONMENT, die_with_parent
from weight_sync import TensorSource, WeightManifest, server_args, server_env
from weight_sync.channel import MAX_HELLO_BYTES, Listener
from weight_sync.push.session import PushSession

VOCAB_SIZE = 96
WHERE = ["http://h:1 worker 0.0", "http://h:1 worker 0.1"]
PROMPTS = [[5, 6, 7, 8], [11, 3, 42, 9, 17, 23], [60, 61, 62], [90, 2, 2, 4, 8, 16, 32, 64]]


@dataclass(frozen=True)
class Server:
    """A running server, its process and its log."""

    url: str
    api_key: str | None
    process: "subprocess.Popen[bytes] | ForkedProcess"
    log: Path


class ForkedProcess:
    """A process that is not this one's child, with what the tests use of a Popen. It has a process group of its own."""

    def __init__(self, pid: int) -> None:
        self.pid, self._descriptor = pid, os.pidfd_open(pid)

    def poll(self) -> int | None:
        """0 when it has ended, whatever its exit status."""
        return 0 if select.select([self._descriptor], [], [], 0)[0] else None

    def wait(self, timeout: float) -> int:
        if not select.select([self._descriptor], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return 0


def assert_not_claimed(error: BaseException) -> None:
    """The server refused the pusher's claim, because another pusher owns it."""
    cause: Any = error.__cause__
    assert cause.step == "POST /init_weight_transfer_engine", error


def tiny_model(family: str = "qwen3", *, seed: int, tied: bool = True, hidden: int = 64) -> Any:
    """A random float32 model that vLLM can serve."""
    if family == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
        config = family_config("Qwen3MoeConfig", hidden_size=hidden, tie_word_embeddings=tied, **experts)
        return testing.random_model(config, seed=seed, random_norms=True)
    num_heads = 4 if family == "qwen3" else 2
    config = testing.tiny_config(
        family,
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        head_dim=32 if family == "qwen3" else hidden // num_heads,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        eos_token_id=0,
        pad_token_id=0,
    )
    return testing.random_model(config, seed=seed, random_norms=True)


def family_config(name: str, *without: str, **changes: Any) -> Any:
    """A tiny config of any class of transformers that vLLM's CPU build can serve (heads of 32)."""
    import transformers

    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    return getattr(transformers, name)(**{key: sizes[key] for key in sizes if key not in without} | changes)


def save_model(model: Any, folder: Path) -> Path:
    """Write a Hugging Face folder with a word-level tokenizer."""
    model.save_pretrained(folder)
    testing.write_word_tokenizer(folder, VOCAB_SIZE, eos_token="w0", bos_token="w1")
    return folder


@contextlib.contextmanager
def running_server(
    folder: Path,
    log: Path,
    *,
    api_key: str | None = None,
    extra_args: Sequence[str] = (),
    env: dict[str, str] | None = None,
) -> Iterator[Server]:
    """A vLLM server on the CPU, killed with its whole process group at the end."""
    server = start_server(folder, log, api_key=api_key, extra_args=extra_args, extra_env=env)
    try:
        wait_healthy(server)
        yield server
    finally:
        stop_server(server)


def start_server(
    folder: Path,
    log: Path,
    *,
    api_key: str | None = None,
    extra_args: Sequence[str] = (),
    extra_env: dict[str, str] | None = None,
    port: int | None = None,
    host: NetworkHost | None = None,
) -> Server:
    """Start a server without waiting for it, on this host or on another one."""
    port = port or free_port()
    address = host.address if host else "127.0.0.1"
    arguments = ["--model", str(folder)]
    arguments += ["--host", address, "--port", str(port), "--dtype", "float32", "--max-model-len", "128"]
    arguments += ["--max-num-seqs", "8", "--enforce-eager", "--served-model-name", "policy"]
    arguments += ["--kv-cache-memory-bytes", "64M", "--no-enable-chunked-prefill"]
    arguments += ["--logprobs-mode", "processed_logprobs"]
    arguments += [*server_args(), *extra_args]
    if api_key:
        arguments += ["--api-key", api_key]
    url = f"http://{address}:{port}"
    network = host and f"/proc/{host.pid}/ns/net"
    forked = _forker()
    order = {"arguments": arguments, "log": str(log), "env": extra_env or {}, "network": network}
    forked.stdin.write(json.dumps(order) + "\n")
    forked.stdin.flush()
    return Server(url, api_key, ForkedProcess(int(forked.stdout.readline())), log)


SERVER = Path(__file__).with_name("weight_sync_server.py")


def _server_env() -> dict[str, str]:
    # vLLM compiles two functions of its sampler even in eager mode, and the engine busy-waits for a worker in another
    # process; both cost too much on the two cores of a test run.
    env = {"TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    return server_env() | env | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "CUDA_VISIBLE_DEVICES": ""}


@functools.cache
def _forker() -> Any:
    """The process that imports vLLM once and forks the servers; it dies with the test run."""
    return subprocess.Popen(
        [sys.executable, str(SERVER)],
        env={**os.environ, **CPU_ENVIRONMENT, **_server_env()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def wait_healthy(server: Server) -> None:
    """Wait for /health."""

    def is_settled() -> bool:
        with contextlib.suppress(*NO_ANSWER):
            return call(server, "GET", "/health")[0] == 200
        return server.process.poll() is not None

    wait_until(is_settled, 420.0, interval_s=0.2)
    assert server.process.poll() is None, f"server did not start:\n{server.log.read_text()[-4000:]}"


def stop_server(server: Server) -> None:
    """Kill the server and everything it started."""
    stop_process(server.process)


def call(server: Server, method: str, path: str, body: Any = None, timeout_s: float = 60.0) -> tuple[int, Any]:
    """One HTTP call: status and decoded body."""
    status, text = endpoint.call(Endpoint(server.url, server.api_key), method, path, body, timeout_s=timeout_s)
    with contextlib.suppress(ValueError):
        return status, json.loads(text)
    return status, text


def generate(
    server: Server, prompt: list[int], num_tokens: int = 24, timeout_s: float = 60.0, name: str = "policy"
) -> tuple[list[int], list[float]]:
    """Greedy token ids and their log-probs."""
    body = {"model": name, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0.0, "logprobs": 1}
    body |= {"return_token_ids": True, "ignore_eos": True}
    status, answer = call(server, "POST", "/v1/completions", body, timeout_s)
    assert status == 200, answer
    choice = answer["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@torch.no_grad()
def expected(model: Any, prompt: list[int], num_tokens: int = 24) -> list[int]:
    """Greedy continuation by transformers, without a cache."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
def log_probs_of(model: Any, prompt: list[int], response: list[int]) -> list[float]:
    """The trainer's log-probs of the response's tokens."""
    ids = torch.tensor([[*prompt, *response]])
    log_probs = model(ids).logits[0].float().log_softmax(-1)
    return [float(log_probs[len(prompt) - 1 + i, token]) for i, token in enumerate(response)]


def assert_serves(server: Server, model: Any, name: str = "policy") -> float:
    """Check that the server's greedy output is the model's; returns the mean absolute log-prob difference."""
    differences = []
    for prompt in PROMPTS:
        tokens, log_probs = generate(server, prompt, name=name)
        assert tokens == expected(model, prompt)
        ours = log_probs_of(model, prompt, tokens)
        differences += [abs(a - b) for a, b in zip(ours, log_probs, strict=True)]
    return sum(differences) / len(differences)


class ChangedSource:
    """Sends zeros, under a manifest that differs from ``source``'s in the entry with this suffix; None omits it."""

    def __init__(self, source: TensorSource, suffix: str, changes: dict[str, Any] | None) -> None:
        self._source, self._suffix, self._changes = source, suffix, changes

    def manifest(self) -> WeightManifest:
        return WeightManifest.of(
            dataclasses.replace(entry, **(self._changes or {})) if entry.name.endswith(self._suffix) else entry
            for entry in self._source.manifest().entries
            if self._changes is not None or not entry.name.endswith(self._suffix)
        )

    def fill(self, bucket: Any, out: torch.Tensor | None) -> None:
        if out is not None:
            out.zero_()


class ServerKillingSource:
    """``source``; kills a process group when it fills the fourth bucket, and counts how often each bucket is filled."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.process_group: int | None = None
        self.num_fills: Counter[int] = Counter()

    def manifest(self) -> WeightManifest:
        return self._source.manifest()

    def fill(self, bucket: Any, out: torch.Tensor | None) -> None:
        self.num_fills[bucket.index] += 1
        if bucket.index == 3 and self.process_group is not None:
            os.killpg(self.process_group, signal.SIGKILL)
        self._source.fill(bucket, out)


def is_paused(server: Server) -> bool:
    """True if the server is paused."""
    return bool(call(server, "GET", "/is_paused")[1]["is_paused"])


def flip_bytes(monkeypatch: Any, times: int, from_index: int = 0) -> None:
    """Corrupt the first ``times`` buckets from an index on, after their checksum was computed."""
    announce = PushSession._announce
    left = [times]

    def corrupt(self: PushSession, push: Any, bucket: Any, value: Any) -> None:
        if left[0] and bucket.index >= from_index:
            left[0] -= 1
            self._senders.buffer(bucket)[17] += 1
        announce(self, push, bucket, value)

    monkeypatch.setattr(PushSession, "_announce", corrupt)


#: What the servers of the running test could not be asked; conftest.py skips for it when the test has passed.
UNASKED: list[str] = []


def assert_reports_version(server: Server, version: int) -> None:
    """Check the version that vLLM's own route reports, if this vLLM has the route (0.26 does not)."""
    routes = call(server, "GET", "/openapi.json")[1]["paths"]
    if "/weight_info" in routes:
        assert call(server, "GET", "/weight_info")[1] == {"weight_version": str(version)}
    else:
        UNASKED.append(f"this vLLM has no route /weight_info: version {version} was not read back")


#: What a stranger may send instead of a hello.
STRANGERS = {
    "six bytes": b"\x00\x00\x00\x02{x",
    "deep JSON": struct.pack("!I", 60_000) + b"[" * 60_000,
    "deep JSON, closed": struct.pack("!I", 60_000) + b"[" * 30_000 + b"]" * 30_000,
    "no UTF-8": b"\x00\x00\x00\x02\xff\xfe",
    "no object": b"\x00\x00\x00\x01" + b"7",
    "oversize": struct.pack("!I", MAX_HELLO_BYTES + 1) + b"{" * 1000,
    "huge": b"\xff" * 100_000,
    "more than a hello": b"\x00\x00\x00\x02{}{}",
    "wrong token": b"\x00\x00\x00\x0d" + b'{"token":"x"}',
    "token of another type": b"\x00\x00\x00\x0e" + b'{"token":[[1]]}'[:14],
    "token beyond ASCII": struct.pack("!I", 18) + b'{"token":"\xc3\xa9\xc3\xa9"}  ',
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
}


def stranger(listener: Listener, data: bytes) -> socket.socket:
    """A connection of somebody without the token."""
    if listener.address.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect("\0" + listener.address.removeprefix("unix:"))
    else:
        _, port, host = listener.address.split(":")
        sock = socket.create_connection((host, int(port)))
    with contextlib.suppress(OSError):  # the pusher may have hung up already
        sock.sendall(data)
    sock.settimeout(60.0)
    return sock
