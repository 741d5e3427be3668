"""Configuration of the servers, the client and sampling. Standard library only."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from plinth_base import Endpoint as Endpoint

from .errors import RequestTooLongError, RolloutConfigError


def require(ok: bool, field: str, value: Any, allowed: str) -> None:
    """Raises RolloutConfigError about an argument or a setting, unless `ok`."""
    if not ok:
        raise RolloutConfigError(field=field, value=value, allowed=allowed)


def _require_positive(config: object, fields: Iterable[str], *, or_none: bool = False) -> None:
    for field in fields:
        value = getattr(config, field)
        if value is None and or_none:
            continue
        require(value is not None and value > 0, field, value, "greater than 0" + (" or None" if or_none else ""))


_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM's --max-lora-rank accepts
_RESERVED_ARGUMENTS = ("--host", "--port", "--api-key", "--served-model-name", "--model", "--logprobs-mode")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Settings of the servers and of the client that sends requests to them."""

    # ---- servers -------------------------------------------------------------------------------------------------
    num_servers: int | None = None
    """Number of servers to start, each with a whole model. null: 1, unless an app chooses it (one per GPU).
    Ignored with `urls`."""
    tensor_parallel_size: int = 1
    """Number of GPUs that share a server's model."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the servers. auto: that of the installed build of vLLM."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of weights and activations. auto: vLLM's choice (bfloat16 for float32 weights)."""
    max_model_len: int | None = None
    """Context length in tokens, prompt and response. null: the model's maximum, unless an app chooses it."""
    max_num_seqs: int | None = None
    """Maximum number of sequences that a server decodes at a time. null: 256, unless an app chooses it."""
    gpu_memory_utilization: float | None = None
    """Fraction of GPU memory that a server may use, above 0 and at most 1. null: 0.5, unless an app chooses it. Ignored
    on the CPU."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Dtype of the KV cache. auto: the model's. fp8: half of the memory, less accurate, so compare log-probs; GPU
    only."""
    quantization: Literal["none", "bitsandbytes"] = "none"
    """bitsandbytes: linear layers in NF4, rounded while the folder is loaded; GPU only, adapters alone can be
    pushed."""
    kv_cache_gib: float | None = None
    """KV cache of each GPU, or of each server on the CPU, in GiB. null: 1 on the CPU; what `gpu_memory_utilization`
    leaves on GPUs, unless an app chooses it."""
    enforce_eager: bool | None = None
    """false: torch.compile and CUDA graphs, which start later and decode faster. null: false on GPUs, true on the
    CPU."""
    prefix_caching: bool = True
    """vLLM keeps the KV cache of shared prefixes, such as the prompt of a group; not for models with recurrent layers
    where `chunked_prefill` is off."""
    speculative: Literal["none", "ngram"] = "none"
    """ngram: tokens that followed the last ones earlier in a sequence are drafts, which a step verifies together. The
    distribution and its log-probs stay those of the model. Servers draft where that saves time, which their logs say.
    vLLM then schedules one step at a time."""
    speculative_tokens: int = 3
    """Drafts per step and sequence with `speculative`."""
    chunked_prefill: bool | None = None
    """vLLM splits long prompts over several steps. null: false on the CPU, whose engine crashes with seeds per request;
    true on GPUs."""
    sleep_mode: bool = False
    """Allow `servers.control.sleep`, which frees GPU memory between rollouts; GPU only. Apps set it for
    `trainer.take_turns`."""
    control_routes: bool = False
    """Enable the routes that abort requests, pause servers and update weights. They ask for the API key."""
    max_lora_rank: int | None = None
    """Largest LoRA rank that servers accept, one of vLLM's sizes; adapters are then pushed alone. null: no LoRA."""
    profile_dir: str | None = None
    """Folder on the servers' host for traces (`servers.control.start_profile`). null: no traces."""
    load_format: str = "auto"
    """vLLM's --load-format. dummy: random weights, if weights are pushed anyway."""
    deterministic: bool = False
    """Equal seeds give equal tokens, however requests are batched; slower."""
    match_trainer: bool = False
    """Compute what the trainer computes, bit for bit (servers/exact): for Llama, Qwen2 and Qwen3 models and Qwen3's
    mixtures that a trainer runs with the same operations. Slower."""
    fast_paths: bool = True
    """Our replacements of parts of vLLM (servers/fast: buffered tokens, scheduling, attention, start). False: stock
    vLLM, slower, and without the policy version of each token."""
    cpu_threads: int | None = None
    """OpenMP threads per server, whatever OMP_NUM_THREADS is; None: 1 on GPUs, on the CPU half of the cores divided by
    num_servers, at least 1."""
    port: int | None = None
    """Port of the first server; further servers use the following ports. null: free ports."""
    host: str = "127.0.0.1"
    """Address of the network interface on which servers listen."""
    extra_args: tuple[str, ...] = ()
    """Further command-line arguments of vLLM. They come last and override the others."""
    startup_timeout_s: float = 600.0
    """Time limit in seconds until a started server answers."""
    stop_grace_s: float = 5.0
    """Seconds between SIGTERM and SIGKILL when a server is stopped."""
    # ---- existing servers ----------------------------------------------------------------------------------------
    urls: tuple[str, ...] = ()
    """Existing servers, such as [http://10.0.0.1:8000]; none is started."""
    api_key: str | None = None
    """Bearer token of every route. null: a random key for servers that are started here."""
    api_key_file: str | None = None
    """File with the token, instead of `api_key`."""
    # ---- client --------------------------------------------------------------------------------------------------
    log_probs: bool = True
    """Request the log-prob of every token. false: faster, and samples have none."""
    routes: bool | None = None
    """Servers of a mixture of experts return the experts of every token, which samples have as `routes`. null: False,
    unless an app needs them."""
    request_timeout_s: float = 600.0
    """Time limit in seconds of one attempt."""
    max_retries: int = 5
    """Maximum number of retries of a group after its first attempt, after up to 0.2, 0.4, 0.8, ... 10 seconds."""
    max_samples_in_flight: int = 1024
    """Maximum number of samples that a server is asked for at a time; further samples wait in the client."""

    def __post_init__(self) -> None:
        _require_positive(self, ("tensor_parallel_size", "startup_timeout_s"))
        _require_positive(self, ("request_timeout_s", "max_samples_in_flight", "speculative_tokens"))
        optional = ("num_servers", "max_num_seqs", "max_model_len", "kv_cache_gib", "cpu_threads")
        _require_positive(self, optional, or_none=True)
        require(self.server_count <= 4096, "num_servers", self.num_servers, "at most 4096")
        loads_folder = self.quantization == "none" or self.load_format in ("auto", "bitsandbytes")
        require(loads_folder, "load_format", self.load_format, f"auto with quantization={self.quantization}")
        rank_fits = self.max_lora_rank in (None, *_LORA_RANKS)
        require(rank_fits, "max_lora_rank", self.max_lora_rank, f"{', '.join(map(str, _LORA_RANKS))} or None")
        for name in ("tensor_parallel_size", "kv_cache_dtype", "quantization", "max_lora_rank"):
            default = getattr(RolloutConfig, name)
            matches = not self.match_trainer or getattr(self, name) == default
            require(matches, name, getattr(self, name), f"{default} with match_trainer")
        require(not (self.match_trainer and self.routes), "routes", self.routes, "off with match_trainer")
        for name in ("deterministic", "match_trainer", "routes", "urls"):
            is_off = not self.speculates or not getattr(self, name)
            require(is_off, name, getattr(self, name), "off with speculative decoding")
        require(self.stop_grace_s >= 0, "stop_grace_s", self.stop_grace_s, "0 or more seconds")
        require(self.max_retries >= 0, "max_retries", self.max_retries, "0 or more")
        memory = self.gpu_memory_utilization
        fits = memory is None or 0 < memory <= 1
        require(fits, "gpu_memory_utilization", memory, "greater than 0 and at most 1, or None")
        last = (self.port or 1) + self.server_count - 1
        ports_fit = self.port is None or 1 <= self.port <= last <= 65535
        require(ports_fit, "port", self.port, "in 1..65535 with room for num_servers ports, or None")
        every_interface = self.host in ("", "0.0.0.0", "::")
        message = "the address of one interface; use 127.0.0.1 unless other hosts send requests"
        require(not every_interface, "host", self.host, message)
        for argument in self.extra_args:
            reserved = argument.partition("=")[0] in _RESERVED_ARGUMENTS
            require(
                not reserved, "extra_args", argument, "a vLLM argument other than " + ", ".join(_RESERVED_ARGUMENTS)
            )
        one_key = self.api_key is None or self.api_key_file is None
        require(one_key, "api_key_file", self.api_key_file, "None if api_key is given")
        for url in self.urls:
            ok = url.startswith(("http://", "https://"))
            require(ok, "urls", url, "http://host:port or https://host:port")

    @property
    def server_count(self) -> int:
        """Number of servers to start."""
        return 1 if self.num_servers is None else self.num_servers

    @property
    def speculates(self) -> bool:
        """True for servers that verify drafts, also by an argument of vLLM."""
        given = (argument.partition("=")[0].replace("_", "-") for argument in self.extra_args)
        return self.speculative != "none" or not {"--speculative-config", "-sc"}.isdisjoint(given)

    def read_api_key(self) -> str | None:
        """The token, from the file if one is given. Raises RolloutConfigError if the file cannot be read."""
        return read_api_key(self.api_key, self.api_key_file)


def read_api_key(api_key: str | None, file: str | None) -> str | None:
    """A secret that is given as such, or as the name of a file that holds it.

    Raises:
        RolloutConfigError: the file cannot be read or is empty.
    """
    if file is None:
        return api_key
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: ~nobody
        raise RolloutConfigError(f"the file cannot be read: {error}", field="api_key_file", value=file) from None
    if not text:
        raise RolloutConfigError("the file is empty", field="api_key_file", value=file, allowed="a file with the key")
    return text


def check_request_length(max_prompt_tokens: int, max_tokens: int, max_model_len: int | None) -> None:
    """Check that prompt and response together fit the context. Raises RequestTooLongError."""
    total = max_prompt_tokens + max_tokens
    if max_model_len is not None and total > max_model_len:
        raise RequestTooLongError(
            f"prompts of up to {max_prompt_tokens} tokens and max_tokens={max_tokens} add up to {total} tokens",
            field="max_model_len",
            value=max_model_len,
            allowed=f"at least {total}, or None",
            remedy="increase it, or shorten the prompts or max_tokens",
        )


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Sampling settings. Every value is sent with every request, so the model's defaults never apply."""

    n: int | None = None
    """Samples per prompt (the group size). null: 8, unless an app chooses it."""
    temperature: float = 1.0
    """Temperature of the samples; 0: greedy."""
    top_p: float = 1.0
    """Samples from the most likely tokens whose probabilities add up to this; 1: all tokens."""
    top_k: int = -1
    """Samples from this number of most likely tokens; -1: all tokens."""
    min_p: float = 0.0
    """Drops tokens less likely than this fraction of the most likely one; 0: none."""
    max_tokens: int | None = None
    """Maximum number of response tokens. null: 256, unless an app chooses it."""
    min_tokens: int = 0
    """Minimum number of response tokens before an end-of-sequence or stop token."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, beside the model's end-of-sequence token."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, such as ["</answer>"]. Their tokens stay in it: the policy sampled them, the loss has
    them, and the reward reads them. A text that an interruption cuts in two is not seen."""
    ignore_eos: bool = False
    """Generation continues after the end-of-sequence token, up to `max_tokens`."""
    repetition_penalty: float = 1.0
    """vLLM's penalty of tokens that the prompt or the response contains; 1: none."""

    @property
    def num_samples(self) -> int:
        """`n`, or its default."""
        return 8 if self.n is None else self.n

    @property
    def response_tokens(self) -> int:
        """`max_tokens`, or its default."""
        return 256 if self.max_tokens is None else self.max_tokens

    def __post_init__(self) -> None:
        _require_positive(self, ("n", "max_tokens"), or_none=True)
        _require_positive(self, ("repetition_penalty",))
        require(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "greater than 0 and at most 1")
        require(self.top_k == -1 or self.top_k > 0, "top_k", self.top_k, "-1 (all tokens) or greater than 0")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "in 0..1")
        ok = 0 <= self.min_tokens <= self.response_tokens
        require(ok, "min_tokens", self.min_tokens, f"in 0..max_tokens ({self.response_tokens})")
        ids_fit = all(0 <= token < 2**31 for token in self.stop_token_ids)
        require(ids_fit, "stop_token_ids", self.stop_token_ids, "token ids, 0 or more")
        require(all(self.stop), "stop", self.stop, "texts that are not empty")
        greedy_group = self.temperature == 0 and self.num_samples > 1
        require(not greedy_group, "n", self.num_samples, "1 when temperature is 0 (greedy samples would all be equal)")
