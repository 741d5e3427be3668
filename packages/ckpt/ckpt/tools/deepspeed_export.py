"""Exports a DeepSpeed checkpoint to a Hugging Face folder, without DeepSpeed and without a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ExportError
from ..hf_export import HfExport, save_hf_folder
from ..zero.zero_checkpoint import ZeroCheckpoint

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
) -> HfExport:
    """Write the Hugging Face folder `out` from a DeepSpeed checkpoint of ZeRO-1, 2 or 3, without a process group.

    `checkpoint` is the folder passed to DeepSpeed's save_checkpoint, or one checkpoint in it; several need a `tag`. The
    weights are the fp32 master weights, cast to `dtype` (None keeps fp32). `on_tensor` gets each tensor's name and its
    size in bytes in the checkpoint, before it is written.

    Raises ShardError as `ZeroCheckpoint` does, ExportError as `save_hf_folder` does and for LoRA adapters.
    """
    shards = ZeroCheckpoint(Path(checkpoint), tag)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in iterate_deepspeed_weights(shards):
            if ".lora_" in name:
                raise ExportError(
                    f"{shards.folder}: {name} belongs to a LoRA adapter. Export from the live engine, which merges it, "
                    "or write the adapter with save_adapter and merge it into its base model with export_merged"
                )
            if on_tensor is not None:
                on_tensor(name, tensor.nbytes)
            yield name, tensor

    return save_hf_folder(
        out,
        stream(),
        model_files_from=model_files_from,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
    )
