"""Memory of a server before it starts: estimate of the GPU's, size of the KV cache, checks of both.

Pure functions, standard library only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from ..config import RolloutConfig
from ..errors import RolloutConfigError
from .device import Device

DEFAULT_CPU_KV_CACHE_GIB = 1.0
_CPU_BLOCK_TOKENS = 128  # tokens per KV cache block of vLLM on the CPU; a sequence uses whole blocks
_GPU_BLOCK_TOKENS = 16
_GRAPH_BYTES, _GRAPH_BYTES_PER_SEQUENCE, _GRAPH_SEQUENCES = 256 * 2**20, 7 * 2**20, 256
"""CUDA graphs and what their capture keeps: 2 GiB for 256 sequences. vLLM captures no more sizes beyond these."""
CONTEXT_BYTES = 2**30
"""CUDA context, libraries and communicators of a process."""
BATCHED_TOKENS = 8192
"""Tokens that vLLM's API server prefills at a time on large GPUs."""
_COPIES_OF_LOGITS = 4
"""fp32 logits, their log-softmax, and what sampling makes of them."""


@dataclass(frozen=True, kw_only=True)
class ServerMemory:
    """Bytes of one server on each of its GPUs."""

    weights: int
    kv_cache: int
    workspace: int
    """Activations of a prefill and logits of all sequences, CUDA graphs and context."""
    asleep: int
    """CUDA graphs and context, which stay on the GPU while the server sleeps, at either level."""

    @property
    def total(self) -> int:
        """Sum of the parts, in bytes."""
        return self.weights + self.kv_cache + self.workspace


def estimate_server_memory(
    *,
    weight_bytes: int,
    kv_bytes_per_token: int,
    kv_tokens: int,
    hidden: int,
    intermediate: int,
    vocab: int,
    max_num_seqs: int,
    tensor_parallel_size: int = 1,
    element_bytes: int = 2,
    graphs: bool = True,
) -> ServerMemory:
    """Memory of a vLLM server whose KV cache holds `kv_tokens` tokens.

    Args:
        weight_bytes: bytes of the whole model.
        kv_bytes_per_token: keys and values of one token in all layers.
        hidden: the model's width.
        intermediate: width of its MLPs.
        vocab: size of its vocabulary.
        element_bytes: bytes per activation.
        graphs: the server captures CUDA graphs.
    """
    tp = tensor_parallel_size
    prefill = BATCHED_TOKENS * (4 * hidden + 3 * intermediate // tp) * element_bytes
    logits = _COPIES_OF_LOGITS * 4 * max_num_seqs * vocab
    captured = _GRAPH_BYTES + _GRAPH_BYTES_PER_SEQUENCE * min(max_num_seqs, _GRAPH_SEQUENCES)
    asleep = (captured if graphs else 0) + CONTEXT_BYTES
    return ServerMemory(
        weights=-(-weight_bytes // tp),
        kv_cache=-(-kv_tokens * kv_bytes_per_token // tp),
        workspace=prefill + logits + asleep,
        asleep=asleep,
    )


def kv_cache_bytes_of(config: RolloutConfig, device: Device) -> int | None:
    """Configured size of the KV cache in bytes; None: vLLM derives it from gpu_memory_utilization."""
    gib = config.kv_cache_gib
    if gib is None:
        if device == "cuda":
            return None
        gib = DEFAULT_CPU_KV_CACHE_GIB
    return int(gib * 2**30)


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
    """Check that one sequence of max_model_len tokens fits. Raises RolloutConfigError with sizes that suffice."""
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
        raise RolloutConfigError(
            f"holds {fits} tokens, less than one sequence of max_model_len={max_len}",
            field="kv_cache_gib",
            value=float(f"{budget / 2**30:.4g}"),
            allowed=f"at least {suffices}",
            remedy=f"or set max_model_len to at most {fits}",
        )


def available_memory_bytes(meminfo: str) -> int | None:
    """MemAvailable, from the text of /proc/meminfo."""
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def check_memory(config: RolloutConfig, device: Device, available_bytes: int | None) -> None:
    """Check that the KV caches of CPU servers fit into free memory. Raises RolloutConfigError."""
    budget = kv_cache_bytes_of(config, device)
    if device != "cpu" or budget is None or available_bytes is None:
        return
    if budget * config.server_count > available_bytes:
        raise RolloutConfigError(
            f"{config.server_count} server(s) need more than the {available_bytes / 2**30:.1f} GiB of free memory",
            field="kv_cache_gib",
            value=float(f"{budget / 2**30:.4g}"),
            remedy="lower it, or num_servers",
        )
