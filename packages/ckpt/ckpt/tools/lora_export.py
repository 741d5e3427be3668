"""Writes LoRA adapters in PEFT's format and merges them into their base model.

    W' = W + s * B A,   s = alpha / r, or alpha / sqrt(r) with rank-stabilized LoRA

computed in fp32 and cast once, at the end. W is [out, in], A [r, in], B [out, r]; for layers that store W as [in, out]
(`fan_in_fan_out`) the product is transposed.

PEFT's names: an adapted layer `q_proj` holds `q_proj.base_layer.weight`, `q_proj.lora_A.default.weight` and
`q_proj.lora_B.default.weight`. The adapter file omits `.default` and prefixes every name with `base_model.model.`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plinth_base.adapters import PEFT_PREFIX, lora_scale, missing_settings

from ..errors import ExportError
from ..files import fsync_file, new_folder
from ..hf_export import HfExport, save_hf_folder
from .model_folder import ModelFolder, read_folder

if TYPE_CHECKING:
    import torch

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_REFUSED = ("lora_magnitude_vector", "lora_embedding", "lora_variant")
_MATRIX = re.compile(r"(?P<layer>.+)\.lora_(?P<side>[AB])(?:\.(?P<adapter>[^.]+))?\.(?P<kind>weight|bias)")
_COPY = re.compile(r"(?P<layer>.+)\.modules_to_save\.(?:[^.]+)\.(?P<rest>.+)")
_MERGE_WITH_PEFT = "merge with PEFT"


def save_adapter(
    out: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    config: Mapping[str, Any],
    *,
    adapter: str = "default",
    overwrite: bool = False,
) -> HfExport:
    """Write PEFT's adapter folder: `adapter_config.json` and `adapter_model.safetensors`, loadable by PEFT and vLLM.

    `tensors` are the trained tensors, under the names of PEFT's files or of a PEFT model's parameters (`.default` and
    the prefix are adjusted); other tensors of such a model are refused. `config` is PEFT's LoraConfig as a dict (sets
    are written as sorted lists). The folder appears by rename. Values and dtypes are unchanged.

    Raises ExportError if `out` exists and is not empty (unless `overwrite`), `config` lacks `r`, `lora_alpha` or
    `target_modules`, A or B of a layer is missing, or a tensor belongs to no adapter.
    """
    from safetensors.torch import save_file

    if missing := missing_settings(config):
        raise ExportError(f"lacks {', '.join(missing)}", field="config", remedy="pass PEFT's adapter configuration")
    copied = tuple(config.get("modules_to_save") or ())
    named: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        written = PEFT_PREFIX + _adapter_name(name.removeprefix(PEFT_PREFIX), adapter, copied)
        if written in named:
            raise _tensor_error(name, "the stream holds this tensor twice")
        # Adapters are small, so all are held at once.
        named[written] = tensor.detach().cpu().contiguous().clone()
    _check_pairs(named)
    with new_folder(Path(out), overwrite=overwrite) as partial:
        save_file(named, partial / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        settings = {"peft_type": "LORA", **config, "inference_mode": True}
        text = json.dumps(settings, indent=2, sort_keys=True, default=_plain)
        (partial / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
        for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG):
            fsync_file(partial / name)
    num_bytes = sum(tensor.nbytes for tensor in named.values())
    return HfExport(path=Path(out), num_tensors=len(named), num_bytes=num_bytes, num_shards=1)


def read_adapter(folder: Path) -> tuple[list[tuple[str, torch.Tensor]], dict[str, Any]]:
    """The tensors and the configuration of a PEFT adapter folder. Reads only safetensors.

    Raises ExportError when a file is missing, also when there is only the pickled `adapter_model.bin`.
    """
    from safetensors.torch import load_file

    folder = Path(folder)
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise ExportError(
                f"there is no {name}",
                field="adapter_folder",
                value=str(folder),
                allowed="a PEFT adapter folder saved as safetensors",
            )
    config: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    return list(load_file(folder / ADAPTER_WEIGHTS).items()), config


def merge_lora(
    tensors: Iterable[tuple[str, torch.Tensor]], config: Mapping[str, Any], *, adapter: str = "default"
) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, tensor) of the whole model with merged adapters, as a stream.

    `tensors` are the model's and the adapter's tensors: those of a live PEFT model in any order, or those of an adapter
    file followed by those of the base model. Merged tensors are fp32, the others keep their dtypes; cast them when they
    are stored (`save_hf_folder(dtype=...)`). Holds the adapters, and base weights that precede their adapters.

    Raises ExportError for DoRA, adapted embeddings and convolutions, trained biases of B, shapes that do not fit, and
    adapters without a base weight.
    """
    if config.get("use_dora"):
        raise ExportError(field="config.use_dora", value=True, allowed="plain LoRA", remedy=_MERGE_WITH_PEFT)
    copied = tuple(config.get("modules_to_save") or ())
    parts: dict[str, dict[str, torch.Tensor]] = {}  # by adapted layer: A, B and the base weight
    originals: dict[str, torch.Tensor] = {}  # of modules that a live PEFT model has trained whole
    replaced: set[str] = set()
    for name, tensor in tensors:
        bare = name.removeprefix(PEFT_PREFIX)
        match, trained = _matrix(bare, adapter), _trained_copy(bare, adapter, copied)
        final = bare.replace(".base_layer.", ".").replace(".original_module.", ".")
        layer, is_weight = final.removesuffix(".weight"), final.endswith(".weight")
        if match is not None:
            layer = match["layer"]
            parts.setdefault(layer, {})[match["side"]] = tensor
        elif trained is not None:
            if trained not in replaced:  # the base model holds the same name
                replaced.add(trained)
                yield trained, tensor
        elif is_weight and (".base_layer." in bare or layer in parts):
            parts.setdefault(layer, {})["weight"] = tensor
        elif ".original_module." in bare:
            originals[final] = tensor
        elif final not in replaced:
            yield final, tensor
        if len(parts.get(layer, ())) == 3:
            yield f"{layer}.weight", _merge(layer, config, **parts.pop(layer))
    if parts:
        raise _tensor_error(", ".join(sorted(parts)[:3]), f"the base weight, A or B is missing in {len(parts)} layers")
    yield from (item for item in originals.items() if item[0] not in replaced)


def export_merged(
    adapter_folder: Path,
    out: Path,
    *,
    base: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> HfExport:
    """Write the Hugging Face folder `out`: the model in the folder `base` with an adapter merged in.

    Holds the adapter and one base tensor at a time. `dtype` as for `save_hf_folder`; None keeps the base model's
    dtypes, also for merged weights. Raises ExportError as `merge_lora` and `save_hf_folder` do.
    """
    adapters, config = read_adapter(adapter_folder)
    model = ModelFolder(Path(base))
    merged = merge_lora(chain(adapters, read_folder(base)), config)
    if dtype is None:
        merged = ((name, tensor.to(model.dtype(name))) for name, tensor in merged)
    return save_hf_folder(
        out, merged, model_files_from=base, dtype=dtype, max_shard_bytes=max_shard_bytes, overwrite=overwrite
    )


def _tensor_error(name: str, problem: str, *, remedy: str | None = None) -> ExportError:
    return ExportError(problem, field="tensors", value=name, remedy=remedy)


def _matrix(name: str, adapter: str) -> re.Match[str] | None:
    if refused := next((part for part in _REFUSED if part in name), None):
        raise _tensor_error(name, f"{refused} is not supported", remedy=_MERGE_WITH_PEFT)
    match = _MATRIX.fullmatch(name)
    if match is None:
        return None
    if match["adapter"] not in (None, adapter):
        raise _tensor_error(name, f"belongs to another adapter than {adapter!r}", remedy="pass those of one adapter")
    if match["kind"] == "bias":
        raise _tensor_error(name, "a bias of B is not supported", remedy=_MERGE_WITH_PEFT)
    return match


def _trained_copy(name: str, adapter: str, copied: tuple[str, ...]) -> str | None:
    """The base model's name of a tensor in a fully trained module (`modules_to_save`), None for other tensors."""
    if match := _COPY.fullmatch(name):
        return f"{match['layer']}.{match['rest']}"
    # PEFT matches the end of the name: "norm" matches "input_layernorm" too.
    if name.rpartition(".")[0].endswith(copied) and ".original_module." not in name:
        return name
    return None


def _adapter_name(name: str, adapter: str, copied: tuple[str, ...]) -> str:
    if match := _matrix(name, adapter):
        return f"{match['layer']}.lora_{match['side']}.weight"
    trained = _trained_copy(name, adapter, copied)
    if trained is None:
        raise _tensor_error(name, "belongs to no adapter", remedy="pass only trained tensors")
    return trained


def _check_pairs(tensors: Mapping[str, torch.Tensor]) -> None:
    if not any(".lora_A." in name for name in tensors):
        raise ExportError("the stream holds no adapter", field="tensors")
    for name in tensors:
        for side, other in (("A", "B"), ("B", "A")):
            if f".lora_{side}." in name and name.replace(f".lora_{side}.", f".lora_{other}.") not in tensors:
                raise _tensor_error(name, f"lora_{other} of this layer is missing")


def _merge(
    layer: str, config: Mapping[str, Any], *, weight: torch.Tensor, A: torch.Tensor, B: torch.Tensor
) -> torch.Tensor:
    if weight.dim() != 2 or A.dim() != 2 or B.dim() != 2:
        raise _tensor_error(layer, f"only matrices are supported, not {list(weight.shape)}", remedy=_MERGE_WITH_PEFT)
    delta = B.float().to(weight.device) @ A.float().to(weight.device)
    if config.get("fan_in_fan_out"):
        delta = delta.T
    if delta.shape != weight.shape:
        shapes = f"{list(weight.shape)}, its adapter {list(delta.shape)}"
        raise _tensor_error(layer, f"the weight has shape {shapes}; the adapter belongs to another model")
    return weight.float() + lora_scale(config, layer, A.shape[0]) * delta


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    return getattr(value, "value", None) or str(value)  # PEFT's enums; dtypes and others
