"""Model FLOPs utilization (MFU): what a model's training steps calculate, of what the GPUs could."""

from ds_engine import ModelShape

PEAK_FLOPS = 989e12
"""Dense bf16 operations per second of an H100 or H200 (NVIDIA's data sheet)."""


def training_mfu(
    shape: ModelShape,
    *,
    prompt: float,
    response: float,
    sequences: float,
    gpu_seconds: float,
    shared_by: float = 1,
) -> float:
    """MFU of updates: a backward pass costs two forward passes, and recomputation does not count.

    Args:
        shared_by: so many sequences share a prompt that is computed once.
    """
    return 3 * sequences * forward_flops(shape, prompt, response, shared_by=shared_by) / (gpu_seconds * PEAK_FLOPS)


def forward_flops(
    shape: ModelShape, prompt: float, response: float, *, shared_by: float = 1, experts_per_token: int = 1
) -> float:
    """Operations of the forward pass of one sequence, of which the response has logits: two for each weight and token.

    In causal attention a token attends to half of its own part on average, and a response to its whole prompt, with two
    operations per feature for the scores and two for the output. Only computed tokens count.
    """
    tokens = prompt / shared_by + response
    attended = prompt * prompt / 2 / shared_by + response * (prompt + response / 2)
    layers = active_weights(shape, experts_per_token) * tokens + 2 * shape.num_layers * shape.query_width * attended
    return 2 * layers + 2 * shape.vocab * shape.hidden * response


def active_weights(shape: ModelShape, experts_per_token: int) -> float:
    """Elements of all layers' matrices that a token is multiplied by: in a mixture, those of its own experts."""
    matrices = [w for w in shape.counted if len(w.shape) > 1 and w.name not in ("embed_tokens", "lm_head")]
    return sum(w.size * (experts_per_token / w.shape[0] if len(w.shape) == 3 else 1) for w in matrices)
