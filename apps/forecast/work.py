"""Bytes of a decoding step. Pure functions."""

import math

from ds_engine import ModelShape

_QUERIES_TOGETHER = 16
"""Queries of a key head that servers compute together at most."""
_PROGRAMS_AT_ONCE = 528
"""Programs of the servers' attention that run at once on an H100 or H200, four on each multiprocessor."""


def prompt_reads(shape: ModelShape, *, sequences: int, samples_per_prompt: int, tensor_parallel: int) -> float:
    """How often decoding reads the KV cache of a prompt for each of its samples: once, or a part of that.

    `servers/fast/attention` of rollout_vllm computes groups of neighboring sequences together, and reads a prompt once for
    a group if all of it continues that prompt. Groups are as small as let all of them run at once, or, with more
    sequences than that, as large as they can be. Other head sizes than 64 and 128 are left to vLLM, which reads a
    prompt for every sample.
    """
    key_heads = max(1, shape.num_kv_heads // tensor_parallel)
    queries = shape.num_heads // tensor_parallel // key_heads
    sizes = [n for n in (1, 2, 4) if n * queries <= _QUERIES_TOGETHER]
    if shape.head_dim not in (64, 128) or not sizes:
        return 1.0
    together = next((n for n in sizes if key_heads * math.ceil(sequences / n) <= _PROGRAMS_AT_ONCE), sizes[-1])
    period = math.lcm(samples_per_prompt, together)
    starts = range(0, period, together)
    reads = (1 if start % samples_per_prompt + together <= samples_per_prompt else together for start in starts)
    return sum(reads) / period


def decode_bytes(
    *, weight_bytes: float, kv_bytes_per_token: float, sequences: int, mean_context: float, tensor_parallel: int
) -> float:
    """Bytes that each GPU of a server reads for one token of every sequence: its weights and its KV cache.

    Args:
        mean_context: tokens whose keys and values are read for a sequence.
    """
    return (weight_bytes + sequences * mean_context * kv_bytes_per_token) / tensor_parallel
