"""EngineConfig -> the dictionary DeepSpeed reads. A pure function, so it is tested without a process."""

from typing import Any

from ..config import EngineConfig, OffloadDevice
from ..dtypes import Dtype
from .loss_scale import NEVER

__all__ = ["deepspeed_config"]

_NAMES: dict[Dtype, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""DeepSpeed's names; checkpoints record them."""


def deepspeed_config(config: EngineConfig, *, device_type: str) -> dict[str, Any]:
    """DeepSpeed's own configuration for `config`.

    Batch sizes are given as one: the engine decides the number of micro batches call by call, scales the loss itself,
    and marks accumulation borders, so DeepSpeed's counts never enter the maths.

    Args:
        device_type: "cpu" or "cuda", where the model computes.
    """
    optim = config.optim
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optim.grad_clip or 0.0,
        "steps_per_print": None,
        # Its throughput timer waits for the device before every forward pass.
        "timers": {"throughput": {"enabled": False}},
        "zero_allow_untested_optimizer": True,
        # Offloaded states are stepped by torch's fused CPU AdamW: DeepSpeed's own needs a compiler at run time.
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": _NAMES[config.grad_accum_dtype]},
        "zero_optimization": _zero_section(config, device_type),
    }
    if config.zero.fp32_reduce:
        settings["communication_data_type"] = _NAMES[config.reduce_dtype]
    if config.dtype == "bfloat16":
        settings["bf16"] = {"enabled": True}
    elif config.dtype == "float16":
        # hysteresis 1: the first overflow already halves the scale.
        settings["fp16"] = {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "hysteresis": 1,
            "loss_scale_window": NEVER,
        }
    return settings


def _zero_section(config: EngineConfig, device_type: str) -> dict[str, Any]:
    zero = config.zero
    bucket_elements = config.reduce_bucket_elements
    overlap = zero.overlap_comm
    if overlap is None:
        overlap = zero.stage == 3 and device_type == "cuda"
    section: dict[str, Any] = {
        "stage": zero.stage,
        "overlap_comm": overlap,
        # Stage 3 lays a bucket's gradients end to end when it sends them: no need to copy them into a buffer before.
        "contiguous_gradients": zero.stage < 3,
        "reduce_scatter": True,
        "reduce_bucket_size": bucket_elements,
        "allgather_bucket_size": bucket_elements // 2 * 2,
    }
    offload = zero.offload
    pin_memory = device_type == "cuda"
    if offload.optimizer != "none":
        section["offload_optimizer"] = _offload_section(offload.optimizer, offload.nvme_path, pin_memory)
    if zero.stage == 3:
        section["stage3_param_persistence_threshold"] = zero.param_persistence_elements
        section["stage3_prefetch_bucket_size"] = bucket_elements
        section["stage3_gather_16bit_weights_on_model_save"] = False
        if offload.param != "none":
            section["offload_param"] = _offload_section(offload.param, offload.nvme_path, pin_memory)
    return section


def _offload_section(device: OffloadDevice, nvme_path: str | None, pin_memory: bool) -> dict[str, Any]:
    section: dict[str, Any] = {"device": device, "pin_memory": pin_memory}
    if device == "nvme":
        section["nvme_path"] = nvme_path
    return section
