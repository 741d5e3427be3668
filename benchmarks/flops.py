"""Model FLOPs utilization (MFU): what a model's training steps calculate, of what the GPUs could."""

from ds_engine import ModelShape

PEAK_FLOPS = 989e12
"""Dense bf16 operations per second of an H100 or H200 (NVIDIA's data sheet)."""


def forward_flops(shape: ModelShape, *, prompt: float, response: float) -> float:
    """Floating-point operations of the forward pass of one sequence.

    Two per weight and token, in the head for response tokens only; attention is causal: 2 operations per feature for
    scores and 2 for the output, over half of the pairs of tokens.
    """
    tokens = prompt + response
    layers = 2 * shape.num_layers * sum(weight.size for weight in shape.linear_layers()) * tokens
    return layers + 2 * shape.vocab * shape.hidden * response + 2 * shape.num_layers * shape.query_width * tokens**2


def training_mfu(shape: ModelShape, *, prompt: float, response: float, sequences: float, gpu_seconds: float) -> float:
    """MFU of updates: a backward pass costs two forward passes, and recomputation does not count."""
    return 3 * sequences * forward_flops(shape, prompt=prompt, response=response) / (gpu_seconds * PEAK_FLOPS)
