"""Operations and bytes of a model's forward pass and of a decoding step. Pure functions."""

import math

from ds_engine import ModelShape

_QUERIES_TOGETHER = 16
"""Queries of a key head that servers compute together at most."""
_FEWEST_PROGRAMS = 198
"""Programs of a GPU from which servers compute neighbors together: 1.5 for each multiprocessor of an H100 or H200."""


def forward_flops(shape: ModelShape, *, prompt: int, response: int) -> float:
    """Floating-point operations of the forward pass of one sequence.

    Two per weight and token in the layers, and in the head for response tokens only; attention is causal: a token
    attends to half of the sequence on average, with 2 operations per feature for scores and 2 for the output.
    """
    tokens = prompt + response
    layers = 2 * shape.num_layers * sum(weight.size for weight in shape.linear_layers()) * tokens
    head = 2 * shape.vocab * shape.hidden * response
    attention = 4 * shape.num_layers * shape.query_width * tokens * tokens / 2
    return layers + head + attention


def layer_flops(shape: ModelShape, *, prompt: int, response: int) -> float:
    """Those of `forward_flops` that recomputation repeats: all but the head's."""
    return forward_flops(shape, prompt=prompt, response=response) - 2 * shape.vocab * shape.hidden * response


def prompt_reads(shape: ModelShape, *, sequences: int, samples_per_prompt: int, tensor_parallel: int) -> float:
    """How often decoding reads the KV cache of a prompt for each of its samples: once, or a part of that.

    `rollout_vllm/servers/attention.py` computes groups of neighboring sequences together, and reads a prompt once for a
    group if all of it continues that prompt. Too few groups to fill the GPU, or other head sizes than 64 and 128, are
    left to vLLM, which reads it for every sample.
    """
    key_heads = max(1, shape.num_kv_heads // tensor_parallel)
    queries = shape.num_heads // tensor_parallel // key_heads
    together = max((n for n in (2, 4) if n * queries <= _QUERIES_TOGETHER), default=1)
    if shape.head_dim not in (64, 128) or key_heads * math.ceil(sequences / together) < _FEWEST_PROGRAMS:
        return 1.0
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
