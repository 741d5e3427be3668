"""Writes LoRA adapters in PEFT's format and merges them into their base model.

    W' = W + s * B A,   s = alpha / r, or alpha / sqrt(r) with rank-stabilized LoRA

computed in fp32 and cast once, at the end. W is [out, in], A [r, in], B [out, r]; for layers that store W as [in, out]
(`fan_in_fan_out`) the product is transposed.

PEFT's names: an adapted layer `q_proj` holds `q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight`. The
adapter file omits `.default` and prefixes every name with `base_model.model.`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plinth_base.adapters import PEFT_PREFIX, lora_scale, missing_settings, without_adapter
from plinth_base.model_folder import stored_tensors

from ..errors import ExportError
from ..files import new_folder, write_text
from ..hf_export import HfExport, save_hf_folder
from ..tensor_file import write_tensors
from .model_folder import ModelFolder, read_folder

if TYPE_CHECKING:
    import torch

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MERGE_WITH_PEFT = "merge it with PEFT (merge_and_unload), and save the model with save_pretrained"
#: Settings of PEFT with which merging is W + s B A; any other that is set is refused.
_PLAIN = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "exclude_modules"),
    *("fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha"),
    *("lora_dropout", "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r"),
    *("rank_pattern", "revision", "target_modules", "task_type", "use_rslora"),
}
#: Other initializations change the base weights; what they change is in no file.
_KEEPS_BASE = (None, True, False, "gaussian", "orthogonal")


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
    if missing := missing_settings(config):
        raise ExportError(f"lacks {', '.join(missing)}", field="config", remedy="pass PEFT's adapter configuration")
    named = {
        f"{PEFT_PREFIX}{name if part == 'whole' else f'{_layer(name)}.{part}.weight'}": tensor
        for name, parts in _changes(tensors, config, adapter).items()
        for part, tensor in parts.items()
    }
    with new_folder(Path(out), overwrite=overwrite) as partial:
        write_tensors(partial / ADAPTER_WEIGHTS, named, {})
        settings = {"peft_type": "LORA", **config, "inference_mode": True}
        text = json.dumps(settings, indent=2, sort_keys=True, default=_plain)
        write_text(partial / ADAPTER_CONFIG, text + "\n")
    num_bytes = sum(tensor.nbytes for tensor in named.values())
    return HfExport(path=Path(out), num_tensors=len(named), num_bytes=num_bytes, num_shards=1)


def read_adapter(folder: Path) -> tuple[list[tuple[str, torch.Tensor]], dict[str, Any]]:
    """The tensors and the configuration of a PEFT adapter folder. Reads only safetensors.

    Raises ExportError when a file is missing or damaged, also when there is only the pickled `adapter_model.bin`.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        return list(load_file(folder / ADAPTER_WEIGHTS).items()), config
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise ExportError(
            f"cannot be read: {error}",
            field="adapter_folder",
            value=str(folder),
            allowed=f"a PEFT adapter folder with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}",
        ) from error


def merge_lora(
    adapters: Iterable[tuple[str, torch.Tensor]], base: Iterable[tuple[str, torch.Tensor]], config: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the base model as a stream, with the adapters merged in.

    `adapters` have the names of an adapter file or of a PEFT model's parameters, and are held in memory; `base` has
    Hugging Face names. Merged tensors are fp32, the others keep their dtypes; cast them when they are stored
    (`save_hf_folder(dtype=...)`).

    Raises ExportError for settings and tensors of anything but LoRA matrices and whole trained modules, for shapes that
    do not fit, and for a tensor that the base model lacks.
    """
    _check_settings(config)
    changes = _changes(adapters, config)
    for name, tensor in base:
        change = changes.pop(name, {})
        if "lora_A" in change:
            tensor = _merge(_layer(name), config, change.get("base_layer", tensor), change["lora_A"], change["lora_B"])
        yield name, change.get("whole", tensor)
    if changes:
        raise _tensor_error(min(changes), "the base model has no such tensor", remedy="give the adapter's base model")


def export_merged(
    adapter_folder: Path,
    out: Path,
    *,
    base: Path,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> HfExport:
    """Write the Hugging Face folder `out`: the model in the folder `base` with an adapter merged in.

    Holds the adapter, one base tensor and one shard at a time. `dtype` as for `save_hf_folder`; None keeps the base
    model's dtypes, also for merged weights. Embeddings that are tied in the base model and trained apart are no longer
    tied in `out`. Before `out` appears, the logits of a few tokens are compared with those of PEFT's base and adapter,
    loaded one after the other; without PEFT a warning says that this was not done.

    Raises ExportError as `merge_lora` and `save_hf_folder` do, for a tensor that the base model lacks, and for logits
    that differ.
    """
    adapter_folder, base = Path(adapter_folder), Path(base)
    adapters, config = read_adapter(adapter_folder)
    model = ModelFolder(base)
    if (init := config.get("init_lora_weights")) not in _KEEPS_BASE:
        problem = "it changes the base weights, and the adapter does not hold the change"
        raise ExportError(problem, field="config.init_lora_weights", value=init, remedy=_MERGE_WITH_PEFT)
    _check_settings(config)
    trained = _changes(adapters, config).keys()
    untied = {tied: source for tied, source in model.tied.items() if trained & {tied, source}}
    merged = merge_lora(adapters, _with_copies(read_folder(base), untied), config)
    if dtype is None:
        merged = ((name, tensor.to(model.dtype(untied.get(name, name)))) for name, tensor in merged)
    return save_hf_folder(
        out,
        merged,
        model_files_from=base,
        dtype=dtype,
        overwrite=overwrite,
        config_changes={"tie_word_embeddings": False} if untied else None,
        check=lambda folder: _compare_with_peft(adapter_folder, base, folder),
    )


def _with_copies(
    tensors: Iterable[tuple[str, torch.Tensor]], copies: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, and those that `copies` names again under a second name."""
    for name, tensor in tensors:
        yield name, tensor
        yield from ((copy, tensor) for copy, source in copies.items() if source == name)


def _compare_with_peft(adapter_folder: Path, base: Path, merged: Path) -> None:
    """Raise ExportError unless the logits of a few tokens are PEFT's, up to the rounding of the dtype."""
    try:
        expected = _logits(base, adapter_folder)
    except Exception as error:  # PEFT is not installed, or transformers does not know the model
        warnings.warn(f"{adapter_folder}: the merged model is not compared with PEFT's: {error}", stacklevel=2)
        return
    largest, difference = float(expected.abs().max()), float((_logits(merged) - expected).abs().max())
    dtypes = {stored.dtype for folder in (base, merged) for stored in stored_tensors(folder).values()}
    if not difference <= (0.05 if dtypes & {"bfloat16", "float16"} else 3e-5) * max(largest, 1.0):
        raise ExportError(
            f"the merged model's logits differ from PEFT's by {difference:.3g} (largest: {largest:.3g})",
            field="adapter_folder",
            value=str(adapter_folder),
            remedy=_MERGE_WITH_PEFT,
        )


def _logits(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kind = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModelForCausalLM)
    model = kind.from_pretrained(folder, dtype="auto", trust_remote_code=False)
    if adapter is not None:
        import peft

        model = peft.PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        ids = torch.arange(1, 9)[None] % config.get_text_config().vocab_size
        logits: torch.Tensor = model.eval()(input_ids=ids).logits
    return logits.float()


def _check_settings(config: Mapping[str, Any]) -> None:
    """Raise ExportError, by name, for settings of anything but plain LoRA."""
    kind = getattr(config.get("peft_type"), "value", config.get("peft_type"))
    if kind not in (None, "LORA"):
        raise ExportError(field="config.peft_type", value=kind, allowed="LORA", remedy=_MERGE_WITH_PEFT)
    for key, value in config.items():
        if value and key not in _PLAIN and not (key == "loftq_config" and not any(value.values())):
            raise ExportError("not plain LoRA", field=f"config.{key}", value=value, remedy=_MERGE_WITH_PEFT)


def _tensor_error(name: str, problem: str, *, remedy: str | None = None) -> ExportError:
    return ExportError(problem, field="tensors", value=name, remedy=remedy)


def _changes(
    tensors: Iterable[tuple[str, torch.Tensor]], config: Mapping[str, Any], adapter: str = "default"
) -> dict[str, dict[str, torch.Tensor]]:
    """Copies of an adapter's tensors, by the base model's name of the tensor that they change and by part.

    The parts are lora_A, lora_B and, of an adapted head, base_layer; or whole.
    """
    changes: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        changed, part = _changed(name, config, adapter)
        if part in changes.setdefault(changed, {}):
            raise _tensor_error(name, "the stream holds this tensor twice")
        changes[changed][part] = tensor.detach().cpu().clone()  # adapters are small
    if not any("lora_A" in change for change in changes.values()):
        raise ExportError("the stream holds no adapter", field="tensors")
    for changed, change in changes.items():
        if "whole" not in change and len(change.keys() & {"lora_A", "lora_B"}) < 2:
            raise _tensor_error(changed, f"its adapter has only {', '.join(change)}")
    return changes


def _changed(name: str, config: Mapping[str, Any], adapter: str) -> tuple[str, str]:
    """The base model's name of the tensor that a tensor of an adapter changes, and the part."""
    bare = without_adapter(name.removeprefix(PEFT_PREFIX), adapter)
    layer, _, part = bare.removesuffix(".weight").rpartition(".")
    if bare.endswith(".weight") and part in ("lora_A", "lora_B", "base_layer"):
        return f"{layer}.weight", part
    final = bare.replace(".modules_to_save.", ".").replace(".base_layer.", ".")
    is_trained_bias = final.endswith(".bias") and config.get("bias", "none") != "none"
    # PEFT matches the end of the name: "norm" matches "input_layernorm" too.
    if is_trained_bias or final.rpartition(".")[0].endswith(tuple(config.get("modules_to_save") or ())):
        return final, "whole"
    raise _tensor_error(name, f"not plain LoRA of the adapter {adapter!r}", remedy=_MERGE_WITH_PEFT)


def _layer(name: str) -> str:
    return name.removesuffix(".weight")


def _merge(
    layer: str, config: Mapping[str, Any], weight: torch.Tensor, A: torch.Tensor, B: torch.Tensor
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
