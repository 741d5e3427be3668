"""Merges LoRA adapters into their base model.

    W' = W + s * B A,   s = alpha / r, or alpha / sqrt(r) with rank-stabilized LoRA

computed in fp32 and cast once, at the end. W is [out, in], A [r, in], B [out, r]; for layers that store W as [in, out]
(`fan_in_fan_out`) the product is transposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from plinth_base.adapters import PEFT_PREFIX, lora_scale, without_adapter

from ..errors import ExportError

if TYPE_CHECKING:
    import torch

_MERGE_WITH_PEFT = "merge it with PEFT (merge_and_unload), and save the model with save_pretrained"
#: Settings of PEFT with which merging is W + s B A; any other that is set is refused.
_PLAIN = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "exclude_modules"),
    *("fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout"),
    *("megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision"),
    *("target_modules", "task_type", "use_rslora"),
}
#: Values of other settings that change nothing. Further initializations change the base weights.
_HARMLESS = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "orthogonal")}


def merge_lora(
    adapters: Iterable[tuple[str, torch.Tensor]],
    base: Iterable[tuple[str, torch.Tensor]],
    config: Mapping[str, Any],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the base model as a stream, with the adapters merged in.

    `adapters` have the names of an adapter file or of a PEFT model's parameters, and are held in memory; `base` has
    Hugging Face names. Merged tensors are fp32, the others keep their dtypes; cast them when they are stored
    (`save_hf_folder(dtype=...)`).

    Raises ExportError for settings and tensors of anything but plain LoRA, for shapes that do not fit, and for a tensor
    that the base model lacks.
    """
    _check_settings(config)
    pairs = _pairs(adapters)
    for name, tensor in base:
        layer = name.removesuffix(".weight")
        yield name, _merge(layer, config, tensor, **pairs.pop(layer)) if layer in pairs else tensor
    if pairs:
        raise _tensor_error(min(pairs), "the base model has no such layer", remedy="give the adapter's base model")


def _check_settings(config: Mapping[str, Any]) -> None:
    """Raise ExportError, by name, for settings of anything but plain LoRA."""
    kind = getattr(config.get("peft_type"), "value", config.get("peft_type"))
    if kind not in (None, "LORA"):
        raise ExportError(field="config.peft_type", value=kind, allowed="LORA", remedy=_MERGE_WITH_PEFT)
    for key, value in config.items():
        is_set = any(value.values()) if isinstance(value, Mapping) else bool(value)
        if is_set and key not in _PLAIN and value not in _HARMLESS.get(key, ()):
            raise ExportError("not plain LoRA", field=f"config.{key}", value=value, remedy=_MERGE_WITH_PEFT)


def _pairs(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    """Copies of an adapter's matrices, `lora_A` and `lora_B`, by the base model's name of their layer."""
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        layer, _, part = without_adapter(name.removeprefix(PEFT_PREFIX)).removesuffix(".weight").rpartition(".")
        if part not in ("lora_A", "lora_B") or part in pairs.setdefault(layer, {}):
            raise _tensor_error(name, "not plain LoRA, or twice in the stream", remedy=_MERGE_WITH_PEFT)
        pairs[layer][part] = tensor.detach().cpu().clone()  # adapters are small
    if not pairs:
        raise ExportError("the stream holds no adapter", field="tensors")
    for layer, pair in pairs.items():
        if len(pair) < 2:
            raise _tensor_error(layer, f"its adapter has only {', '.join(pair)}")
    return pairs


def _tensor_error(name: str, problem: str, *, remedy: str | None = None) -> ExportError:
    return ExportError(problem, field="tensors", value=name, remedy=remedy)


def _merge(
    layer: str, config: Mapping[str, Any], weight: torch.Tensor, lora_A: torch.Tensor, lora_B: torch.Tensor
) -> torch.Tensor:
    if weight.dim() != 2 or lora_A.dim() != 2 or lora_B.dim() != 2:
        raise _tensor_error(layer, f"only matrices are supported, not {list(weight.shape)}", remedy=_MERGE_WITH_PEFT)
    delta = lora_B.float().to(weight.device) @ lora_A.float().to(weight.device)
    if config.get("fan_in_fan_out"):
        delta = delta.T
    if delta.shape != weight.shape:
        shapes = f"{list(weight.shape)}, its adapter {list(delta.shape)}"
        raise _tensor_error(layer, f"the weight has shape {shapes}; the adapter belongs to another model")
    return weight.float() + lora_scale(config, layer, lora_A.shape[0]) * delta
