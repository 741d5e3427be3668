"""Open settings of an engine: learning rate, number format, attention kernel, compiled layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ds_engine import EngineConfig, ModelShape
from ds_engine.planning.model_shape import COMPILED

from ..config import BUILTIN_MODEL, ModelConfig
from ..errors import InputError
from ..launch.gpus import Gpu
from ..rules import value_of
from ..training.supervised_config import LearningRates
from .resolved import ConfigT, ResolvedConfig

_AMPERE = (8, 0)
"""Compute capability of the first GPUs with bfloat16 and FlashAttention."""


def resolve_learning_rate(
    resolved: ResolvedConfig[ConfigT], section: str, model: ModelConfig, engine: EngineConfig, rates: LearningRates
) -> ResolvedConfig[ConfigT]:
    """`SupervisedConfig.optim` and `PreferenceTrainingConfig.optim` have the sources."""
    rate, why = rates.full, "all weights of a trained model"
    if model.path == BUILTIN_MODEL:
        rate, why = rates.builtin, "the built-in model starts from random weights"
    elif engine.lora is not None:
        rate, why = rates.lora, "LoRA adapters"
    return with_rate(resolved, section, rate, why)


def with_rate(
    resolved: ResolvedConfig[ConfigT], section: str, rate: float, why: str, *, listed: bool = True
) -> ResolvedConfig[ConfigT]:
    """`rate` of AdamW, or what corresponds to it for the section's optimizer, where `optim.lr` is open."""
    optim = value_of(resolved.config, f"{section}.optim")
    if optim.rate_factor not in (0, 1):
        rate, why = float(f"{rate * optim.rate_factor:.6g}"), f"{why}; {optim.rate_factor:g} times AdamW's"
    return resolved.with_default(f"{section}.optim.lr", rate, why, listed=listed)


def resolve_kernels(
    resolved: ResolvedConfig[ConfigT], sections: Iterable[str], gpus: Sequence[Gpu]
) -> ResolvedConfig[ConfigT]:
    """float16 and SDPA on GPUs without bfloat16 and FlashAttention (before Ampere, such as Turing)."""
    oldest = min((gpu.capability for gpu in gpus if gpu.capability is not None), default=_AMPERE)
    if oldest >= _AMPERE:
        return resolved
    of_gpu = f"on GPUs of compute capability {oldest[0]}.{oldest[1]}"
    for section in sections:
        resolved = resolved.with_default(f"{section}.dtype", "float16", f"no bfloat16 {of_gpu}")
        resolved = resolved.with_default(f"{section}.attention", "sdpa", f"no FlashAttention {of_gpu}")
        if value_of(resolved.config, f"{section}.dtype") == "bfloat16":
            raise InputError(
                field=f"{section}.dtype", value="bfloat16", allowed=f"float16 or float32 {of_gpu}, or null"
            )
    return resolved


def resolve_compile(
    resolved: ResolvedConfig[ConfigT], section: str, engine: EngineConfig, shape: ModelShape | None, *, on_gpu: bool
) -> ResolvedConfig[ConfigT]:
    """Compiled layers where they pay off; `shape`: as in `resolve_job_for`."""
    compiles, why = _compiles(engine, shape) if on_gpu else (False, "off on the CPU")
    return resolved.with_default(f"{section}.compile", compiles, why)


def _compiles(engine: EngineConfig, shape: ModelShape | None) -> tuple[bool, str]:
    if shape is None:
        return False, "compiling takes longer than training the built-in model"
    if shape.family not in COMPILED:
        return False, f"only {', '.join(COMPILED)} are compiled without being asked"
    if engine.match_servers:
        return False, "match_servers computes each operation by itself"
    if engine.lora is not None and engine.lora.base_format == "nf4":
        return False, "an NF4 base is dequantized outside of compiled layers"
    if engine.zero.offload.param == "nvme":
        return False, "weights on NVMe are fetched in hooks inside the layers"
    return True, "compiled layers train faster"
