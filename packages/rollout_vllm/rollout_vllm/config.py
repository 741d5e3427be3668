"""Settings of the servers, the client and the sampling. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal


def _require(ok: bool, field: str, value: Any, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{field}={value!r}: allowed is {allowed}")


def _require_positive(config: object, fields: Iterable[str], *, or_none: bool = False) -> None:
    for field in fields:
        value = getattr(config, field)
        if value is None and or_none:
            continue
        _require(value is not None and value > 0, field, value, "a number above 0" + (" or None" if or_none else ""))


_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's --max-lora-rank takes
_OUR_ARGUMENTS = ("--host", "--port", "--api-key", "--served-model-name", "--model", "--logprobs-mode")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How servers are started and how the client talks to them."""

    # ---- servers -------------------------------------------------------------------------------------------------
    num_servers: int = 1  # servers to start (data-parallel replicas); ignored when urls are given
    tensor_parallel_size: int = 1  # GPUs a server
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: by the installed vLLM distribution
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = (
        "auto"  # auto: vLLM's choice (bfloat16 for float32 weights)
    )
    max_model_len: int | None = None  # tokens, prompt + response; None: the model's own
    max_num_seqs: int = 256  # sequences a server decodes at once
    gpu_memory_utilization: float = 0.5  # share of GPU memory a server may take, 0..1; unused on CPU
    kv_cache_gib: float | None = None  # KV cache in GiB; None: 1 on CPU, what gpu_memory_utilization leaves on GPU
    enforce_eager: bool = True  # False: torch.compile and CUDA graphs: a slower start, faster decoding
    prefix_caching: bool = True
    chunked_prefill: bool | None = None  # None: off on CPU (a per-request seed would kill that engine), on elsewhere
    sleep_mode: bool = False  # servers that can give their GPU memory back between rollouts (control.sleep); GPU only
    control_routes: bool = False  # routes to cut requests short, pause and update weights (behind the API key as all)
    max_lora_rank: int | None = None  # servers take LoRA adapters up to this rank, one of vLLM's sizes; None: none
    load_format: str = "auto"  # vLLM's --load-format; "dummy": random weights, for those that push weights anyway
    deterministic: bool = False  # same seeds, same tokens, whatever the batching; slower
    cpu_threads: int | None = (
        None  # OpenMP threads a CPU server; None: half the cores divided by num_servers, at least 1
    )
    port: int | None = None  # first server's port, the next ones count up; None: free ports
    host: str = "127.0.0.1"  # interface the servers bind to
    extra_args: tuple[str, ...] = ()  # more arguments for vLLM, last, so they win
    startup_timeout_s: float = 600.0
    stop_grace_s: float = 5.0  # time a server has to end itself before it is killed
    # ---- already running servers ---------------------------------------------------------------------------------
    urls: tuple[str, ...] = ()  # e.g. ("http://10.0.0.1:8000",); then nothing is started
    api_key: str | None = None  # bearer token of every route; None: a fresh random one for servers we start
    # ---- client --------------------------------------------------------------------------------------------------
    request_timeout_s: float = 600.0  # one HTTP attempt
    connect_timeout_s: float = 10.0
    max_retries: int = 5  # further attempts after the first, per group
    retry_base_s: float = 0.2  # first delay; doubles each time, with full jitter
    retry_max_s: float = 10.0
    max_samples_in_flight: int = 1024  # per server; more wait in the client (back-pressure)

    def __post_init__(self) -> None:
        _require_positive(self, ("num_servers", "tensor_parallel_size", "max_num_seqs", "startup_timeout_s"))
        _require_positive(self, ("request_timeout_s", "connect_timeout_s", "retry_base_s", "retry_max_s"))
        _require_positive(self, ("max_samples_in_flight",))
        _require_positive(self, ("max_model_len", "kv_cache_gib", "cpu_threads"), or_none=True)
        rank_fits = self.max_lora_rank in (None, *_LORA_RANKS)
        _require(rank_fits, "max_lora_rank", self.max_lora_rank, f"one of {', '.join(map(str, _LORA_RANKS))}, or None")
        _require(self.stop_grace_s >= 0, "stop_grace_s", self.stop_grace_s, "0 or more seconds")
        _require(self.max_retries >= 0, "max_retries", self.max_retries, "0 or more")
        memory = self.gpu_memory_utilization
        _require(0 < memory <= 1, "gpu_memory_utilization", memory, "above 0, at most 1")
        last = (self.port or 1) + self.num_servers - 1
        ports_fit = self.port is None or 1 <= self.port <= last <= 65535
        _require(ports_fit, "port", self.port, "1..65535 with room for num_servers ports, or None")
        every_interface = self.host in ("", "0.0.0.0", "::")
        _require(not every_interface, "host", self.host, "one interface's address, 127.0.0.1 unless others call in")
        for argument in self.extra_args:
            ours = argument.partition("=")[0] in _OUR_ARGUMENTS
            _require(not ours, "extra_args", argument, "any vLLM argument but " + ", ".join(_OUR_ARGUMENTS))
        for url in self.urls:
            ok = url.startswith(("http://", "https://"))
            _require(ok, "urls", url, "http://host:port or https://host:port")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How responses are sampled. Every value is sent with each request: the model's own defaults never apply."""

    n: int = 8  # samples a prompt: the size of a group
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    min_p: float = 0.0
    max_tokens: int = 256  # response tokens at most
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # beside the model's end of sequence
    ignore_eos: bool = False
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        _require_positive(self, ("n", "max_tokens", "repetition_penalty"))
        _require(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0, at most 1")
        _require(self.top_k == -1 or self.top_k > 0, "top_k", self.top_k, "-1 (all) or above 0")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "0..1")
        ok = 0 <= self.min_tokens <= self.max_tokens
        _require(ok, "min_tokens", self.min_tokens, f"0..max_tokens ({self.max_tokens})")
        greedy_group = self.temperature == 0 and self.n > 1
        _require(not greedy_group, "n", self.n, "1 when temperature is 0 (greedy samples would all be equal)")
