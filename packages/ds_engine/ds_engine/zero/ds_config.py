"""Translates EngineConfig into DeepSpeed's configuration dictionary. Does not import torch."""

import difflib
from collections.abc import Mapping
from typing import Any

from plinth_base.dtypes import Dtype

from ..config import EngineConfig, OffloadDevice
from ..errors import EngineConfigError

_NAMES: dict[Dtype, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""DeepSpeed's names. Checkpoints record them."""
_NEVER = 2**62
"""Number of good steps after which DeepSpeed doubles the fp16 loss scale; the engine does that itself (`LossScale`)."""


def deepspeed_config(config: EngineConfig, *, device_type: str, trainable: bool = True) -> dict[str, Any]:
    """DeepSpeed's configuration for `config`.

    Batch sizes are 1: the engine chooses the number of micro batches in every call, scales the loss and marks the
    accumulation boundary, so DeepSpeed's counts have no effect.

    Args:
        device_type: "cpu" or "cuda", where the model computes.
        trainable: False for a frozen model, which has no optimizer states to offload.
    """
    optim = config.optim
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optim.grad_clip or 0.0,
        "steps_per_print": None,
        # The throughput timer synchronizes with the device before every forward pass.
        "timers": {"throughput": {"enabled": False}},
        "zero_allow_untested_optimizer": True,
        # torch's fused AdamW steps offloaded states on the CPU; DeepSpeed's needs a C++ compiler at run time.
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": _NAMES[config.grad_accum_dtype]},
        "zero_optimization": _zero_section(config, device_type, trainable),
    }
    if config.zero.fp32_reduce:
        settings["communication_data_type"] = _NAMES[config.reduce_dtype]
    if config.model_dtype == "bfloat16":
        settings["bf16"] = {"enabled": True}
    elif config.model_dtype == "float16":
        # With hysteresis 1 the first overflow already halves the scale.
        settings["fp16"] = {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "hysteresis": 1,
            "loss_scale_window": _NEVER,
        }
    return settings


def _zero_section(config: EngineConfig, device_type: str, trainable: bool) -> dict[str, Any]:
    zero = config.zero
    bucket_elements = config.reduce_bucket_elements
    overlap = zero.overlap_comm
    if overlap is None:
        overlap = zero.stage == 3 and device_type == "cuda"
    section: dict[str, Any] = {
        "stage": zero.stage,
        "overlap_comm": overlap,
        # Stage 3 concatenates a bucket's gradients when it reduces them, so it needs no contiguous buffer.
        "contiguous_gradients": zero.stage < 3,
        "reduce_scatter": True,
        "reduce_bucket_size": bucket_elements,
        "allgather_bucket_size": bucket_elements // 2 * 2,
    }
    offload = zero.offload
    pin_memory = device_type == "cuda"
    if offload.optimizer != "none" and trainable:
        section["offload_optimizer"] = _offload_section(offload.optimizer, offload.nvme_path, pin_memory)
    if zero.stage == 3:
        section["stage3_param_persistence_threshold"] = zero.param_persistence_elements
        section["stage3_prefetch_bucket_size"] = bucket_elements
        section["stage3_gather_16bit_weights_on_model_save"] = False
        if offload.param != "none":
            section["offload_param"] = _offload_section(offload.param, offload.nvme_path, pin_memory)
    return section | dict(zero.deepspeed)


def check_deepspeed(config: EngineConfig) -> None:
    """Lets DeepSpeed's own model check `zero.deepspeed`. Imports DeepSpeed if there is anything to check.

    Raises:
        EngineConfigError: a key is unknown to DeepSpeed, or it refuses a value.
    """
    if not config.zero.deepspeed:
        return
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    try:
        DeepSpeedZeroConfig(**_zero_section(config, device_type="cpu", trainable=True))
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0]) from None


def _refusal(detail: Mapping[str, Any]) -> EngineConfigError:
    key = ".".join(map(str, detail["loc"]))
    field = f"zero.deepspeed.{key}"
    if detail["type"] != "extra_forbidden":
        return EngineConfigError(f"DeepSpeed refuses it: {detail['msg']}", field=field, value=detail["input"])
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    known = [field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()]
    near = difflib.get_close_matches(key, known, n=1)
    remedy = f"nearest: {near[0]}" if near else None
    return EngineConfigError("unknown to DeepSpeed's zero_optimization section", field=field, remedy=remedy)


def _offload_section(device: OffloadDevice, nvme_path: str | None, pin_memory: bool) -> dict[str, Any]:
    section: dict[str, Any] = {"device": device, "pin_memory": pin_memory}
    if device == "nvme":
        section["nvme_path"] = nvme_path
    return section
