"""Operations and bytes of a model's forward pass and of a decoding step. Pure functions."""

from ds_engine import ModelShape


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


def decode_bytes(
    *, weight_bytes: float, kv_bytes_per_token: float, sequences: int, mean_context: float, tensor_parallel: int
) -> float:
    """Bytes that each GPU of a server reads for one token of every sequence: its weights and its KV cache."""
    return (weight_bytes + sequences * mean_context * kv_bytes_per_token) / tensor_parallel
