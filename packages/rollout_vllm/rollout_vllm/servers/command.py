"""Command line and environment of a server, as pure functions of the configuration."""

import json
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..config import RolloutConfig
from .auth import KEY_VARIABLE
from .device import Device
from .memory import kv_cache_bytes_of

SERVED_MODEL_NAME = "policy"
AUTH_MIDDLEWARE = "rollout_vllm.servers.auth.ApiKeyMiddleware"
VERSION_MIDDLEWARE = "rollout_vllm.servers.policy_versions.PolicyVersionMiddleware"
COMPLETION_MIDDLEWARE = "rollout_vllm.servers.fast.completions.CompletionMiddleware"
DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_GPU_MEMORY_UTILIZATION = 0.5
MAX_GRAPH_SIZE = 512
"""The largest batch for which vLLM captures a CUDA graph by default."""

# Variables of the launching process that would silently change the server, or that it has no need of.
_DROPPED_VARIABLES = (
    "VLLM_CPU_KVCACHE_SPACE",  # would override --kv-cache-memory-bytes
    "VLLM_PORT",
    "VLLM_API_KEY",
    "RAY_AUTH_TOKEN",
    "VLLM_ALLOW_INSECURE_SERIALIZATION",  # pickle
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
)
_DROPPED_PREFIX = "TORCHELASTIC_"
"""Set by torchrun: with TORCHELASTIC_USE_AGENT_STORE a GPU server waits indefinitely for torchrun's store."""


def server_threads(device: Device, num_cores: int, num_servers: int, requested: int | None) -> int:
    """OpenMP threads of each server.

    One on a GPU: by default each of several servers has as many threads as the host has cores, and where they load a
    pushed adapter at the same time, the threads of all wait for each other (benchmarks/weight_sync/README.md).
    CPU servers leave half of the cores to the trainer and the HTTP front ends.
    """
    if requested is not None:
        return requested
    return 1 if device == "cuda" else max(1, num_cores // (2 * num_servers))


def is_recurrent(model_path: str) -> bool:
    """True if config.json describes recurrent layers: linear attention, Mamba or short convolutions."""
    file = Path(model_path) / "config.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    names = content.keys() | content.get("text_config", {}).keys()
    return not names.isdisjoint(
        ("mamba_d_state", "ssm_state_size", "state_size", "linear_conv_kernel_dim", "conv_L_cache")
    )


def server_arguments(
    config: RolloutConfig,
    model_path: str,
    *,
    port: int,
    device: Device,
    multicast: bool = True,
    extra_args: Sequence[str] = (),
) -> list[str]:
    """vLLM's arguments. `extra_args` and then `config.extra_args` come last, so they override the others.

    multicast: whether the environment lets torch's symmetric memory use NVLink multicast.
    """
    args = ["--model", model_path, "--served-model-name", SERVED_MODEL_NAME]
    args += ["--host", config.host, "--port", str(port)]
    for middleware in (COMPLETION_MIDDLEWARE, VERSION_MIDDLEWARE, AUTH_MIDDLEWARE):  # the last one is the outermost
        args += ["--middleware", middleware]
    args += ["--dtype", config.dtype, "--load-format", config.load_format]
    # On the CPU, results depend on the batch composition; a batch of one sequence is reproducible.
    max_num_seqs = 1 if config.deterministic and device == "cpu" else config.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    args += ["--max-num-seqs", str(max_num_seqs)]
    # Log-probs of the distribution that tokens are sampled from: after temperature, top-p and top-k.
    args += ["--logprobs-mode", "processed_logprobs"]
    args += ["--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"]
    if config.max_model_len is not None:
        args += ["--max-model-len", str(config.max_model_len)]
    given = [each.replace("_", "-") for each in (*extra_args, *config.extra_args)]  # vLLM takes both
    compiled = any(each.startswith(("--compilation-config", "-cc")) for each in given)
    if is_eager(config, device):
        args += ["--enforce-eager"]
    elif device == "cuda" and config.fast_paths and not compiled and not any("cudagraph" in each for each in given):
        verified = 1 if config.speculative == "none" else 1 + config.speculative_tokens
        args += ["--cudagraph-capture-sizes", *(str(verified * size) for size in graph_sizes(max_num_seqs))]
    # routes.py records those of computed tokens alone; vLLM on a GPU has those of cached ones, too.
    uncached = device == "cpu" and (config.deterministic or config.routes)
    chunked = config.chunked_prefill if config.chunked_prefill is not None else device != "cpu"
    uncached = uncached or (not chunked and is_recurrent(model_path))  # vLLM caches states at the ends of chunks
    prefix_caching = config.prefix_caching and not uncached
    args += ["--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching"]
    args += ["--enable-chunked-prefill" if chunked else "--no-enable-chunked-prefill"]
    if config.match_trainer and device == "cuda" and not is_eager(config, device):
        # Compiled layers keep sums in float32 that others round. Graphs of decoding steps need no compiler.
        args += ["--compilation-config.mode=0", "--compilation-config.cudagraph_mode=FULL_DECODE_ONLY"]
    if config.speculative != "none":
        drafts = {"method": config.speculative, "num_speculative_tokens": config.speculative_tokens}
        args += ["--speculative-config", json.dumps({**drafts, "prompt_lookup_min": 2, "prompt_lookup_max": 4})]
    if config.routes:
        args += ["--no-async-scheduling"] if device == "cpu" else ["--enable-return-routed-experts"]
    if config.tensor_parallel_size > 1:
        args += ["--tensor-parallel-size", str(config.tensor_parallel_size)]
        if device == "cuda" and not multicast and not compiled:
            # vLLM 0.26 fuses all-reduces with a kernel that needs a multicast address, and does not look for one.
            args += ["--compilation-config.pass_config.fuse_allreduce_rms=false"]
    if device == "cuda":
        args += ["--gpu-memory-utilization", str(config.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION)]
    if config.kv_cache_dtype != "auto":
        args += ["--kv-cache-dtype", config.kv_cache_dtype]
    if config.quantization != "none":  # the loader rounds while it reads the folder
        args += ["--quantization", config.quantization, "--load-format", config.quantization]
    if config.sleep_mode:
        args += ["--enable-sleep-mode"]
    if config.profile_dir is not None:
        profiler = {"profiler": "torch", "torch_profiler_dir": config.profile_dir, "torch_profiler_with_stack": False}
        args += ["--profiler-config", json.dumps(profiler)]
    if config.max_lora_rank is not None:  # two: the next version is loaded before the current one is unloaded
        args += ["--enable-lora", "--max-lora-rank", str(config.max_lora_rank), "--max-loras", "2"]
    kv_cache_bytes = kv_cache_bytes_of(config, device)
    if kv_cache_bytes is not None:
        args += ["--kv-cache-memory-bytes", str(kv_cache_bytes)]
    return [*args, *extra_args, *config.extra_args]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes for which CUDA graphs are captured: half of vLLM's, in half of the time of a server's start.

    A step is padded to the next size, by at most 15 sequences up to 128 and 31 beyond: below the rows of one tile of a
    matrix product.
    """
    most = min(2 * max_num_seqs, MAX_GRAPH_SIZE)
    sizes = [1, 2, 4, 8, *range(16, 128, 16), *range(128, most + 1, 32)]
    return sorted({size for size in sizes if size < most} | {most})


def has_multicast(environment: Mapping[str, str]) -> bool:
    """True if torch's symmetric memory may use NVLink multicast, where the GPUs have it."""
    return environment.get("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0") in ("", "0")


def is_eager(config: RolloutConfig, device: Device) -> bool:
    """True for a server without torch.compile and CUDA graphs."""
    return device == "cpu" if config.enforce_eager is None else config.enforce_eager


def inherited_environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` without the variables that would silently change a server, e.g. those of torchrun."""
    return {k: v for k, v in base.items() if k not in _DROPPED_VARIABLES and not k.startswith(_DROPPED_PREFIX)}


def server_environment(
    base: Mapping[str, str],
    config: RolloutConfig,
    *,
    device: Device,
    api_key: str,
    num_cores: int,
    gpu_ids: Sequence[int | str] | None = None,
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Environment of a server: the launcher's `base`, overridden by our variables and then by `extra`."""
    env = inherited_environment(base) | {
        KEY_VARIABLE: api_key,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # FlashInfer's sampler is compiled at the first start, which takes two minutes; vLLM's sampler is not.
        "VLLM_USE_FLASHINFER_SAMPLER": base.get("VLLM_USE_FLASHINFER_SAMPLER", "0"),
    }
    if config.host.startswith("127.") and "lo" in (name for _, name in socket.if_nameindex()):
        # gloo would listen on the address of the host's name.
        env["GLOO_SOCKET_IFNAME"] = base.get("GLOO_SOCKET_IFNAME", "lo")
    if config.sleep_mode or config.control_routes:
        env["VLLM_SERVER_DEV_MODE"] = "1"  # enables these routes; the API key protects them too
    if config.max_lora_rank is not None:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    env["PLINTH_ROLLOUT_FAST_PATHS"] = "1" if config.fast_paths else "0"
    env["PLINTH_ROLLOUT_SPECULATIVE"] = "1" if config.speculates else "0"
    env["PLINTH_ROLLOUT_DRAFTING"] = "0" if config.speculative == "none" else "1"
    env["PLINTH_ROLLOUT_EXACT"] = "1" if config.match_trainer else "0"
    threads = server_threads(device, num_cores, config.server_count, config.cpu_threads)
    env["OMP_NUM_THREADS"] = str(threads)
    if device == "cpu":
        # By default vLLM pins its threads to the first cores, which other servers and trainer ranks use too.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if config.routes:
            env["PLINTH_ROLLOUT_ROUTES"] = "1"
        if threads == 1:
            env["PLINTH_ROLLOUT_FORK"] = "1"
        if config.tensor_parallel_size == 1:
            # Runs the worker in the engine's process (vLLM's "uni" executor). With a separate worker process, both
            # processes spin for a second after every message, which costs each server one core (two during a sync).
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if is_eager(config, device):
            # vLLM compiles two sampler functions even with --enforce-eager: 5 to 30 s at the first request.
            env["TORCHDYNAMO_DISABLE"] = "1"
    else:
        env["PLINTH_ROLLOUT_GPU"] = "1"
        if config.quantization != "none":
            env["PLINTH_ROLLOUT_QUANTIZATION"] = config.quantization
        if config.tensor_parallel_size == 1:
            # vLLM's command line chooses spawn, with which the engine imports vLLM a second time. Nothing initializes
            # CUDA before the fork; vLLM would spawn then.
            env["VLLM_WORKER_MULTIPROC_METHOD"] = base.get("VLLM_WORKER_MULTIPROC_METHOD", "fork")
        if config.deterministic and not config.match_trainer:  # whose operations depend on no batch either
            env["VLLM_BATCH_INVARIANT"] = "1"
    if gpu_ids is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(g) for g in gpu_ids)
    return env | dict(extra or {})


_SECRET = re.compile(r"key|token|secret|password", re.IGNORECASE)


def describe_environment(env: Mapping[str, str]) -> str:
    """The variables that affect a server, one per line and without secrets, for the start of its log."""
    prefixes = ("VLLM_", "CUDA_", "OMP_", "HF_", "NCCL_", "TORCH", "PLINTH_")
    return "\n".join(f"{k}={v}" for k, v in sorted(env.items()) if k.startswith(prefixes) and not _SECRET.search(k))
