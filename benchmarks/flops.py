"""Model FLOPs utilization (MFU): what a model's training steps calculate, of what the GPUs could."""

from ds_engine import ModelShape
from ds_engine.planning.operations import forward_operations

PEAK_FLOPS = 989e12
"""Dense bf16 operations per second of an H100 or H200 (NVIDIA's data sheet)."""


def training_mfu(shape: ModelShape, *, prompt: float, response: float, sequences: float, gpu_seconds: float) -> float:
    """MFU of updates: a backward pass costs two forward passes, and recomputation does not count."""
    operations = forward_operations(shape, prompt=prompt, response=response).total
    return 3 * sequences * operations / (gpu_seconds * PEAK_FLOPS)
