"""Loads a Hugging Face causal LM for a ZeRO stage: whole at stages 1 and 2, sharded as it is read at stage 3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .attention import ATTENTION_NAME, register_packed_attention
from .errors import ModelError

if TYPE_CHECKING:
    from .config import EngineConfig

__all__ = ["load_causal_lm", "torch_dtype"]


def torch_dtype(name: str) -> torch.dtype:
    """bf16, fp16 or fp32 as torch's dtype."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


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
    return model if sharded else model.to(device)


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
