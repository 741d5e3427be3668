"""Exports a DeepSpeed checkpoint to a Hugging Face folder, without DeepSpeed and without a process group.

Names, shapes and dtypes are those of the model folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ExportError
from ..hf_export import HfExport, save_hf_folder
from ..zero.zero_checkpoint import ZeroCheckpoint
from .lora_export import merge_lora
from .model_folder import ModelFolder, read_folder

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
    overwrite: bool = False,
    lora: Mapping[str, Any] | None = None,
    base: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
) -> HfExport:
    """Write the Hugging Face folder `out` from a DeepSpeed checkpoint of ZeRO-1, 2 or 3, without a process group.

    `checkpoint` is the folder passed to DeepSpeed's save_checkpoint, or one checkpoint in it; several need a `tag`. The
    weights are the fp32 master weights, cast to `dtype`; None: to that of each tensor in `model_files_from`, or else in
    its config.json. `lora`: PEFT's settings (`lora_alpha`, `use_rslora`) of the adapters in the checkpoint; they are
    merged into the weights of `model_files_from`, their base model. `base`: (name, tensor) of that folder -> the tensor
    with which the adapters were trained, where it differs (a quantized base).

    Raises ShardError as `ZeroCheckpoint` does, ExportError as `save_hf_folder` and `merge_lora` do, for LoRA adapters
    without `lora`, for a tensor that the model folder or the checkpoint lacks, one of another shape, and without a
    `dtype` where the folder states none.
    """
    shards = ZeroCheckpoint(Path(checkpoint), tag)
    model = ModelFolder(Path(model_files_from))

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        stored = iterate_deepspeed_weights(shards)
        if lora is not None:  # a checkpoint trains the adapters; their base model is the folder
            shards.check()
            adapters = ((name, shards.whole(name)) for name in shards.shapes)
            used = (
                (name, tensor if base is None else base(name, tensor)) for name, tensor in read_folder(model_files_from)
            )
            stored = merge_lora(adapters, used, lora)
        written = list[str]()
        for name, tensor in stored:
            if ".lora_" in name:
                raise ExportError(
                    f"{name} of {shards.folder} belongs to a LoRA adapter",
                    field="lora",
                    value=None,
                    remedy="pass the adapter's settings, or write it with save_adapter and merge it with export_merged",
                )
            for folder_name, part in model.parts(name, tensor):
                written.append(folder_name)
                yield folder_name, part if dtype is not None else part.to(model.dtype(folder_name))
        for folder_name, part in model.frozen_vision(written):
            written.append(folder_name)
            yield folder_name, part
        model.check_complete(written)

    return save_hf_folder(out, stream(), model_files_from=model_files_from, dtype=dtype, overwrite=overwrite)
