"""Checks before a server starts: model folder, context length, KV cache, memory, ports."""

import errno
import importlib.util
import json
import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from plinth_base.model_folder import ModelFolderError, check_model_folder

from ..config import RolloutConfig
from ..errors import KVCacheTooSmallError, PortInUseError, RequestTooLongError, RolloutConfigError
from .command import Device, kv_cache_bytes_of

_CPU_BLOCK_TOKENS = 128  # tokens per KV cache block of vLLM on the CPU; a sequence uses whole blocks
_GPU_BLOCK_TOKENS = 16


def read_model_config(model_path: str, *, load_format: str = "auto") -> dict[str, Any] | None:
    """Return the folder's config.json as a dict. None: `model_path` is a model on the Hub, which is not checked.

    Raises ModelFolderError: the folder does not exist, or has no valid config.json, no tokenizer or no weights.
    """
    try:
        folder = Path(model_path).expanduser()
        exists = folder.exists()
    except (OSError, RuntimeError, ValueError) as error:  # ~nobody, a zero byte, a name that is too long
        raise ModelFolderError(f"the path cannot be read: {error}", value=model_path) from None
    if not exists and model_path.count("/") == 1 and model_path[0] not in "./~":
        return None
    check_model_folder(os.path.expanduser(model_path), need_weights=load_format != "dummy")
    try:
        model_config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFolderError(f"config.json is not valid JSON: {error}", value=model_path) from None
    if not isinstance(model_config, dict):
        problem = f"config.json is {type(model_config).__name__} JSON, not an object"
        raise ModelFolderError(problem, value=model_path)
    return dict(model_config)


def check_context(config: RolloutConfig, model_config: Mapping[str, Any] | None) -> None:
    """Check that max_model_len is within the model's context. Raises RequestTooLongError."""
    limit = (model_config or {}).get("max_position_embeddings")
    if config.max_model_len is None or not isinstance(limit, int) or (model_config or {}).get("rope_scaling"):
        return
    if config.max_model_len > limit:
        raise RequestTooLongError(
            f"the model's context is {limit} tokens (max_position_embeddings)",
            field="max_model_len",
            value=config.max_model_len,
        )


def check_cache_folder() -> None:
    """Check that vLLM can write its cache (compiled layers, facts about models). Raises RolloutConfigError."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.path.expanduser(os.environ.get("VLLM_CACHE_ROOT") or os.path.join(cache, "vllm"))
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise RolloutConfigError(
            f"vLLM's cache folder {folder} cannot be written ({error.strerror or error})",
            remedy="set HOME, XDG_CACHE_HOME or VLLM_CACHE_ROOT to a folder that can",
        ) from None


def check_device_features(config: RolloutConfig, device: Device) -> None:
    """Check for settings that the device does not support. Raises RolloutConfigError."""
    if device == "cpu" and config.sleep_mode:
        problem = "a CPU server has no GPU memory to free"
        raise RolloutConfigError(problem, field="sleep_mode", value=True, allowed="false on the CPU")
    if device == "cpu" and config.kv_cache_dtype != "auto":
        raise RolloutConfigError(
            "vLLM has fp8 attention for some processors only (AVX-512), and this package has not tried it",
            field="kv_cache_dtype",
            value=config.kv_cache_dtype,
            allowed="auto on the CPU",
        )
    if config.quantization != "none":
        if device == "cpu":
            raise RolloutConfigError(
                "it needs a GPU kernel", field="quantization", value=config.quantization, allowed="none on the CPU"
            )
        if importlib.util.find_spec(config.quantization) is None:
            raise RolloutConfigError(
                "it needs the package bitsandbytes (and vllm-bnb-plugin from vLLM 0.28 on), which is not installed",
                field="quantization",
                value=config.quantization,
                remedy="install the package, or set quantization=none",
            )
    if device == "cpu" and config.tensor_parallel_size > 1:
        raise RolloutConfigError(
            field="tensor_parallel_size",
            value=config.tensor_parallel_size,
            allowed="1 on the CPU",
            remedy="increase num_servers instead",
        )


def check_request_length(max_prompt_tokens: int, max_tokens: int, max_model_len: int | None) -> None:
    """Check that prompt and response together fit the context. Raises RequestTooLongError."""
    if max_model_len is not None and max_prompt_tokens + max_tokens > max_model_len:
        raise RequestTooLongError(
            f"prompts of up to {max_prompt_tokens} tokens and max_tokens={max_tokens} add up to "
            f"{max_prompt_tokens + max_tokens} tokens",
            field="max_model_len",
            value=max_model_len,
            remedy="shorten the prompts or max_tokens, or increase max_model_len",
        )


def kv_value_bytes(config: RolloutConfig) -> int:
    """Bytes per value of the KV cache."""
    if config.kv_cache_dtype == "fp8":
        return 1
    return 4 if config.dtype == "float32" else 2


def kv_bytes_per_token(model_config: Mapping[str, Any], bytes_per_value: int, tensor_parallel_size: int) -> int | None:
    """KV cache bytes per token on one GPU; None for models with MLA, sliding-window or hybrid attention."""
    layer_types = model_config.get("layer_types") or []
    is_plain = isinstance(layer_types, list) and all(kind == "full_attention" for kind in layer_types)
    layers, heads = model_config.get("num_hidden_layers"), model_config.get("num_attention_heads")
    if "kv_lora_rank" in model_config or not is_plain or not _is_count(layers) or not _is_count(heads):
        return None
    kv_heads = model_config.get("num_key_value_heads") or heads
    hidden = model_config.get("hidden_size")
    head_dim = model_config.get("head_dim") or (hidden // heads if _is_count(hidden) else None)
    if not _is_count(kv_heads) or not _is_count(head_dim):
        return None
    return int(2 * layers * max(1, kv_heads // tensor_parallel_size) * head_dim * bytes_per_value)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and value > 0


def check_kv_cache(config: RolloutConfig, model_config: Mapping[str, Any] | None, device: Device) -> None:
    """Check that one sequence of max_model_len tokens fits. Raises KVCacheTooSmallError with sizes that suffice."""
    budget = kv_cache_bytes_of(config, device)
    if budget is None or model_config is None:
        return
    per_token = kv_bytes_per_token(model_config, kv_value_bytes(config), config.tensor_parallel_size)
    max_len = config.max_model_len or model_config.get("max_position_embeddings")
    if per_token is None or not _is_count(max_len):
        return
    block = _CPU_BLOCK_TOKENS if device == "cpu" else _GPU_BLOCK_TOKENS
    # vLLM reserves one block.
    needed = (-(-max_len // block) + 1) * block * per_token
    if needed > budget:
        fits = max(0, budget // (block * per_token) - 1) * block
        suffices = float(f"{needed / 2**30 * 1.05 + 0.0005:.3f}")
        raise KVCacheTooSmallError(
            f"it holds {fits} tokens, less than one sequence of max_model_len={max_len}",
            field="kv_cache_gib",
            value=float(f"{budget / 2**30:.4g}"),
            remedy=f"set kv_cache_gib to at least {suffices} or max_model_len to at most {fits}",
        )


def available_memory_bytes(meminfo: str) -> int | None:
    """MemAvailable, from the text of /proc/meminfo."""
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def check_memory(config: RolloutConfig, device: Device, available_bytes: int | None) -> None:
    """Check that the KV caches of CPU servers fit into free memory. Raises KVCacheTooSmallError."""
    budget = kv_cache_bytes_of(config, device)
    if device != "cpu" or budget is None or available_bytes is None:
        return
    if budget * config.server_count > available_bytes:
        raise KVCacheTooSmallError(
            f"{config.server_count} server(s) need more than the {available_bytes / 2**30:.1f} GiB of free memory",
            field="kv_cache_gib",
            value=float(f"{budget / 2**30:.4g}"),
            remedy="lower kv_cache_gib or num_servers",
        )


def reserve_port(host: str, port: int | None) -> socket.socket:
    """Reserve a port (None: a free one) with a socket that is bound but does not listen. Raises PortInUseError.

    The kernel never assigns a bound port to a process that requests any free port, and vLLM can still bind it: on Linux
    two sockets with SO_REUSEADDR share an address while neither listens. Keep the socket until the server has stopped.

    Raises RolloutConfigError for a host that is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if port is not None:  # another reservation is detected only by listening
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
                probe.listen(1)
        held = socket.socket(family, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, port or 0))
    except (OSError, UnicodeError) as error:
        if isinstance(error, (socket.gaierror, UnicodeError)) or error.errno == errno.EADDRNOTAVAIL:
            raise RolloutConfigError(
                str(error), field="host", value=host, allowed="the address of a network interface of this machine"
            ) from None
        raise PortInUseError(
            f"on {host}: {error.strerror or error}",
            field="port",
            value=port,
            remedy="choose another port, or unset port to use a free one",
        ) from None
    return held
