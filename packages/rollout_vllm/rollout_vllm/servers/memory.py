"""Estimates the GPU memory of a server before it starts: a pure function, standard library only."""

from dataclasses import dataclass

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
    """What stays on the GPU while the server sleeps, at either level: CUDA graphs and context."""

    @property
    def total(self) -> int:
        """All of it."""
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
