"""Loads a Hugging Face causal LM for a ZeRO stage: whole at stages 1 and 2, sharded as it is read at stage 3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .attention import ATTENTION_NAME, register_packed_attention
from .errors import EngineConfigError, ModelError

if TYPE_CHECKING:
    from .config import EngineConfig, OffloadConfig

__all__ = ["check_offload", "load_causal_lm", "torch_dtype"]


def torch_dtype(name: str) -> torch.dtype:
    """bf16, fp16 or fp32 as torch's dtype."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


def check_offload(offload: OffloadConfig) -> None:
    """Refuse NVMe where it cannot work, before anything is loaded.

    Raises:
        EngineConfigError: no such folder, or DeepSpeed's asynchronous I/O cannot be built here.
    """
    if offload.nvme_path is None:
        return
    if not Path(offload.nvme_path).is_dir():
        raise EngineConfigError(f"zero.offload.nvme_path={offload.nvme_path!r} is not a folder")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise EngineConfigError(
            "offload to nvme needs DeepSpeed's asynchronous I/O, which needs libaio with headers (Debian, Ubuntu: "
            "libaio-dev) and a C++ compiler: install them, or offload to cpu"
        )


def load_causal_lm(
    model_path: str, config: EngineConfig, *, device: torch.device, ds_config: dict[str, Any]
) -> nn.Module:
    """The model in `config.dtype` with packed attention, on `device` (stage 3: sharded over the ranks).

    Raises:
        ModelError: no such folder, or not a causal LM transformers can load.
    """
    from transformers import AutoModelForCausalLM

    if not (Path(model_path) / "config.json").is_file():
        raise ModelError(f"model path {model_path!r} is not a Hugging Face model folder: it has no config.json")
    register_packed_attention()
    torch.manual_seed(config.seed)
    sharded = config.zero.stage == 3
    with _zero3_loading(ds_config) if sharded else _nothing():
        try:
            model: nn.Module = AutoModelForCausalLM.from_pretrained(
                model_path, dtype=torch_dtype(config.dtype), attn_implementation=ATTENTION_NAME
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"cannot load a causal language model from {model_path!r}: {error}") from error
    if not sharded:
        return model.to(device)
    _restore_fp32_buffers(model)
    return model


def _restore_fp32_buffers(model: Any) -> None:
    """Recompute in fp32 what stage 3 rounded to the model's dtype, above all the rotary frequencies.

    DeepSpeed turns every floating tensor made while the model is built into bf16. Parameters should be; frequencies
    rounded to 8 bits shift the angles of far positions by whole radians, and no other stage rounds them.
    """
    for module in model.modules():
        buffers = {
            name: b for name, b in module.named_buffers(recurse=False) if name in module._non_persistent_buffers_set
        }
        rounded = {name: b for name, b in buffers.items() if b.is_floating_point() and b.dtype != torch.float32}
        if not rounded or any(True for _ in module.parameters(recurse=False)):
            continue
        for name, buffer in rounded.items():
            module.register_buffer(name, buffer.float(), persistent=False)
        model._init_weights(module)


@contextmanager
def _zero3_loading(ds_config: dict[str, Any]) -> Iterator[None]:
    """transformers shards while reading as long as this object lives; it keeps only a weak reference to it."""
    from transformers.integrations import HfDeepSpeedConfig

    alive = HfDeepSpeedConfig(ds_config)
    yield
    del alive


@contextmanager
def _nothing() -> Iterator[None]:
    yield
