"""Model FLOPs utilization (MFU): what a model's training steps calculate, of what the GPUs could."""

from ds_engine import ModelShape

PEAK_FLOPS = 989e12
"""Dense bf16 operations per second of an H100 or H200 (NVIDIA's data sheet)."""


def training_mfu(shape: ModelShape, *, prompt: float, response: float, sequences: float, gpu_seconds: float) -> float:
    """MFU of updates: a backward pass costs two forward passes, and recomputation does not count."""
    return 3 * sequences * forward_flops(shape, prompt, response) / (gpu_seconds * PEAK_FLOPS)


def forward_flops(shape: ModelShape, prompt: float, response: float) -> float:
    """Operations of the forward pass of one sequence, of which the response has logits: two for each weight and token.

    In causal attention a token attends to half of the sequence on average, with two operations per feature for its
    scores and two for its output.
    """
    tokens = prompt + response
    layer = sum(weight.size for weight in shape.linear_layers()) + shape.query_width * tokens
    return 2 * shape.num_layers * layer * tokens + 2 * shape.vocab * shape.hidden * response
