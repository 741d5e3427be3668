"""Exports a DeepSpeed checkpoint to a Hugging Face folder, without DeepSpeed and without a process group.

Names, shapes and dtypes are those of the model folder. transformers fuses some tensors while it loads a folder (the
experts of a mixture); its own conversion, the one of `save_pretrained`, cuts them apart again.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ExportError
from ..hf_export import DTYPE_NAMES, HfExport, save_hf_folder
from ..zero.zero_checkpoint import ZeroCheckpoint
from .lora_export import merge_lora, read_folder

if TYPE_CHECKING:
    import torch


def iterate_deepspeed_weights(checkpoint: ZeroCheckpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of every weight, tied ones once; trained ones in fp32, frozen ones in their stored dtype.

    Raises ShardError as `ZeroCheckpoint.check` does, before the first tensor.
    """
    checkpoint.check()
    seen = checkpoint.tied
    trained = ((name, checkpoint.whole(name)) for name in checkpoint.shapes)
    for source in (trained, checkpoint.frozen(), checkpoint.buffers.items()):
        for name, tensor in source:
            if name not in seen:
                seen.add(name)
                yield name, tensor


def export_deepspeed(
    checkpoint: Path,
    out: Path,
    *,
    model_files_from: Path,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    on_tensor: Callable[[str, int], None] | None = None,
    lora: Mapping[str, Any] | None = None,
    base: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
) -> HfExport:
    """Write the Hugging Face folder `out` from a DeepSpeed checkpoint of ZeRO-1, 2 or 3, without a process group.

    `checkpoint` is the folder passed to DeepSpeed's save_checkpoint, or one checkpoint in it; several need a `tag`. The
    weights are the fp32 master weights, cast to `dtype`; None: to that of each tensor in `model_files_from`, or else in
    its config.json. `on_tensor` gets each tensor's name and its size in bytes in the checkpoint, before it is written.
    `lora`: PEFT's settings (`lora_alpha`, `use_rslora`) of the adapters in the checkpoint; they are merged into the
    weights of `model_files_from`, their base model. `base`: (name, tensor) of that folder -> the tensor with which the
    adapters were trained, where it differs (a quantized base).

    Raises ShardError as `ZeroCheckpoint` does, ExportError as `save_hf_folder` and `merge_lora` do, for LoRA adapters
    without `lora`, and without a `dtype` where the model folder states none.
    """
    shards = ZeroCheckpoint(Path(checkpoint), tag)
    model = ModelFolder(Path(model_files_from))

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        stored = iterate_deepspeed_weights(shards)
        if lora is not None:  # a checkpoint holds the adapters; its base model is the folder
            adapters = ((name, tensor) for name, tensor in stored if ".lora_" in name)
            folder = read_folder(Path(model_files_from))
            used = folder if base is None else ((name, base(name, tensor)) for name, tensor in folder)
            stored = merge_lora(chain(adapters, used), lora)
        for name, tensor in stored:
            if ".lora_" in name:
                raise ExportError(
                    f"{name} of {shards.folder} belongs to a LoRA adapter",
                    field="lora",
                    value=None,
                    remedy="pass the adapter's settings, or write it with save_adapter and merge it with export_merged",
                )
            if on_tensor is not None:
                on_tensor(name, tensor.nbytes)
            for folder_name, part in model.parts(name, tensor):
                yield folder_name, part if dtype is not None else part.to(model.dtype(folder_name))

    return save_hf_folder(
        out,
        stream(),
        model_files_from=model_files_from,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
    )


class ModelFolder:
    """Names and dtypes of the tensors in a model folder, which may lack weights."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._folder = folder
        self._dtypes: dict[str, str] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ExportError(f"cannot be read: {error}", field="model_files_from", value=str(path)) from error
            with file:
                self._dtypes |= {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118

    def parts(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the folder that the model's tensor `name` holds."""
        if name in self._dtypes or (model := self._meta_model) is None:
            yield name, tensor
            return
        from transformers.core_model_loading import revert_weight_conversion

        yield from revert_weight_conversion(model, {name: tensor}).items()

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor of the folder, or else of config.json."""
        import torch

        codes = {code: getattr(torch, dtype) for dtype, code in DTYPE_NAMES.items()}
        if name in self._dtypes:
            dtype: torch.dtype = codes[self._dtypes[name]]
            return dtype
        return self._config_dtype

    @cached_property
    def _config_dtype(self) -> torch.dtype:
        import torch

        config = json.loads((self._folder / "config.json").read_text(encoding="utf-8"))
        stated = config.get("dtype") or config.get("torch_dtype")
        if stated not in DTYPE_NAMES:
            raise ExportError(
                f"{self._folder} has no weights and states no dtype in config.json",
                field="dtype",
                value=None,
                remedy="pass a dtype (--dtype)",
            )
        dtype: torch.dtype = getattr(torch, stated)
        return dtype

    @cached_property
    def _meta_model(self) -> Any | None:
        """The model without memory; None, with a warning, where transformers cannot build it."""
        try:
            import torch
            import transformers
            from transformers.core_model_loading import revert_weight_conversion  # noqa: F401

            config = transformers.AutoConfig.from_pretrained(self._folder, trust_remote_code=False)
            with torch.device("meta"):
                return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        except (ImportError, OSError, ValueError, KeyError, TypeError) as error:
            first = str(error).splitlines()[0]
            warnings.warn(f"{self._folder}: tensors keep the checkpoint's names: {first}", stacklevel=2)
            return None
