"""Whole fp32 weights out of the shards of a DeepSpeed checkpoint, without DeepSpeed and without unpickling its code.

A checkpoint is `<folder>/<tag>/` with one or more `*_model_states.pt` and one `*_optim_states.pt` a rank; the latter
hold the fp32 weights, which training works on:

- ZeRO-1 and 2, `single_partition_of_fp32_groups`: for each parameter group, the group's weights one after the other
  (with paddings between them, where named), cut into one piece a rank.
- ZeRO-3, `fp32_flat_groups`: for each parameter group, every rank's piece of the first weight, then of the second; a
  weight of n elements is cut into pieces of ceil(n / ranks), the last padded.

Files are opened with `weights_only` and memory-mapped: pages come in as tensors are read, one tensor at a time. The
few DeepSpeed objects in them are replaced by inert ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ExportError
from .hf_export import HfExport, save_hf_folder

if TYPE_CHECKING:
    import torch

__all__ = ["export_deepspeed", "find_deepspeed_folder", "iterate_deepspeed_weights"]

_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_")


class _Inert:
    """Stands for a DeepSpeed object that weights do not need."""

    def __new__(cls, *_: Any, **__: Any) -> _Inert:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        """Forget it."""


class _Number(int):
    """Stands for DeepSpeed's enumeration of stages."""


_STAND_INS = (
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Inert, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Number, "deepspeed.runtime.zero.config.ZeroStageEnum"),
)


@dataclass(frozen=True, kw_only=True)
class _Shards:
    """The opened files of one checkpoint, in rank order."""

    stage: int
    model: list[dict[str, Any]]
    optimizer: list[dict[str, Any]]


def find_deepspeed_folder(path: Path, tag: str | None = None) -> Path:
    """The folder that holds the shards: `path` itself, or its subfolder `tag`, or its only subfolder with shards.

    Raises ExportError when there is none, or several and no `tag`.
    """
    if tag is not None:
        if not any((path / tag).glob("*_model_states.pt")):
            raise ExportError(f"{path / tag}: holds no DeepSpeed checkpoint (no *_model_states.pt)")
        return path / tag
    if any(path.glob("*_model_states.pt")):
        return path
    found = sorted({file.parent for file in path.glob("*/*_model_states.pt")})
    if len(found) != 1:
        names = ", ".join(folder.name for folder in found)
        what = f"holds several DeepSpeed checkpoints: {names}; give one as tag" if found else "holds none"
        raise ExportError(f"{path}: {what} (looked for *_model_states.pt)")
    return found[0]


def iterate_deepspeed_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of every weight, tied ones once; trainable ones in fp32, frozen ones as they were stored.

    `folder` holds the shards. Raises ExportError for a missing or torn file, a checkpoint without ZeRO, with tensor
    parallelism, or with contents that do not add up; before the first tensor where it can be known.
    """
    shards = _open(folder)
    first = shards.model[0]
    tied = first.get("shared_params") or {}
    tied_names = set(tied if isinstance(tied, dict) else (pair[0] for pair in tied))
    given: set[str] = set()
    trainable = _merge_stage_3(shards, folder) if shards.stage == 3 else _merge_stage_1_or_2(shards, folder)
    for source in (trainable, _frozen(shards), _buffers(first)):
        for name, tensor in source:
            if name not in given and name not in tied_names:
                given.add(name)
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
    """Write the Hugging Face folder `out` from a DeepSpeed checkpoint of ZeRO-1, 2 or 3; no process group needed.

    `checkpoint` is the folder given to DeepSpeed's save_checkpoint, or one checkpoint in it; several need `tag`. The
    weights are the fp32 ones of the optimizer, cast to `dtype` (None keeps fp32). Names are the model's own.
    `on_tensor` is told each tensor's name and size in bytes, as it is stored in the checkpoint, before it is written.

    Raises ExportError as `iterate_deepspeed_weights` and `save_hf_folder` do, and for LoRA adapters, which are no
    model by themselves.
    """
    folder = find_deepspeed_folder(Path(checkpoint), tag)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in iterate_deepspeed_weights(folder):
            if ".lora_" in name:
                raise ExportError(f"{folder}: {name} is a LoRA adapter's; export from the live engine, which merges it")
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


def _open(folder: Path) -> _Shards:
    model_files = sorted(folder.glob("*_model_states.pt"), key=_rank_of)
    optimizer_files = sorted(folder.glob("*_optim_states.pt"), key=_rank_of)
    if not model_files or not optimizer_files:
        raise ExportError(
            f"{folder}: needs *_model_states.pt and *_optim_states.pt; is it a checkpoint of ZeRO-1 to 3?"
        )
    if any((match := _RANK.search(path.name)) and int(match[2]) for path in optimizer_files):
        raise ExportError(f"{folder}: was saved with tensor parallelism, which this export does not read")
    optimizer = [_load(path) for path in optimizer_files]
    states = [shard.get("optimizer_state_dict", {}) for shard in optimizer]
    stage = int(states[0].get("zero_stage", 0))
    count = states[0].get("partition_count", 0)
    world_size = max(count) if isinstance(count, list) else int(count)
    if stage not in (1, 2, 3):
        raise ExportError(f"{folder}: has ZeRO stage {stage}; this export reads stages 1, 2 and 3")
    expected_model_files = world_size if stage == 3 else 1
    for kind, files, expected in (
        ("optim", optimizer_files, world_size),
        ("model", model_files, expected_model_files),
    ):
        ranks = [_rank_of(path) for path in files]
        if ranks != list(range(expected)):
            raise ExportError(
                f"{folder}: was saved by {world_size} ranks at stage {stage}; *_{kind}_states.pt are there of ranks "
                f"{ranks}, needed are {list(range(expected))}"
            )
    return _Shards(stage=stage, model=[_load(path) for path in model_files], optimizer=states)


def _rank_of(path: Path) -> int:
    match = _RANK.search(path.name)
    return int(match[1]) if match else 0


def _load(path: Path) -> dict[str, Any]:
    import torch

    try:
        with torch.serialization.safe_globals(list(_STAND_INS)):
            loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # what torch raises for a torn or foreign file is of many kinds
        raise ExportError(f"{path}: cannot be read safely: {str(error).splitlines()[0]}") from error
    return loaded


def _merge_stage_1_or_2(shards: _Shards, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    groups = [state["single_partition_of_fp32_groups"] for state in shards.optimizer]
    paddings = shards.optimizer[0].get("param_alignment_paddings")
    for index, shapes in enumerate(shards.model[0]["param_shapes"]):
        pieces = [rank[index].reshape(-1) for rank in groups]
        offset = 0
        for position, (name, shape) in enumerate(shapes.items()):
            num_elements = math.prod(shape)
            yield name, _cut(pieces, offset, num_elements, name, folder).reshape(tuple(shape))
            offset += num_elements + (paddings[index][position] if paddings is not None else 0)
        _check_used(offset, sum(piece.numel() for piece in pieces), 2 * len(pieces), index, folder)


def _merge_stage_3(shards: _Shards, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    groups = [state["fp32_flat_groups"] for state in shards.optimizer]
    # The grouping of the flat buffers need not be that of the names; the order is.
    flat = [[piece.reshape(-1) for piece in rank] for rank in groups]
    offset = 0
    for shapes in shards.model[0]["param_shapes"]:
        for name, shape in shapes.items():
            num_elements = math.prod(shape)
            piece_size = -(-num_elements // len(flat))
            parts = [_cut(rank, offset, piece_size, name, folder) for rank in flat]
            yield name, torch.cat(parts)[:num_elements].reshape(tuple(shape))
            offset += piece_size
    _check_used(offset, sum(piece.numel() for piece in flat[0]), 1, 0, folder)


def _cut(pieces: list[torch.Tensor], start: int, num_elements: int, name: str, folder: Path) -> torch.Tensor:
    """Elements [start, start + num_elements) of the pieces laid end to end."""
    import torch

    parts = []
    begin, missing = start, num_elements
    for piece in pieces:
        if missing and begin < piece.numel():
            part = piece[begin : begin + missing]
            parts.append(part)
            missing -= part.numel()
            begin = 0
        else:
            begin -= piece.numel() if missing else 0
    if missing:
        raise ExportError(f"{folder}: {name} ends {missing} elements after its group does; shards and names disagree")
    return parts[0] if len(parts) == 1 else torch.cat([*parts, pieces[0].new_empty(0)])


def _check_used(used: int, held: int, alignment: int, group: int, folder: Path) -> None:
    if -(-used // alignment) != -(-held // alignment):
        raise ExportError(
            f"{folder}: group {group} holds {held} elements, its named weights {used}; shards and names disagree"
        )


def _frozen(shards: _Shards) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    first = shards.model[0]
    fragments = first.get("frozen_param_fragments") or {}
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        if name in fragments:
            parts = [rank["frozen_param_fragments"][name].reshape(-1) for rank in shards.model]
            yield name, torch.cat(parts)[: math.prod(shape)].reshape(tuple(shape))
    # Stages 1 and 2 leave frozen weights whole among the module's own; stage 3 leaves empty ones there.
    trainable = {name for shapes in first["param_shapes"] for name in shapes}
    buffers = set(first.get("buffer_names") or ())
    for name, tensor in (first.get("module") or {}).items():
        if shards.stage < 3 and name not in trainable and name not in buffers:
            yield name, tensor


def _buffers(first: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in first.get("buffer_names") or ():
        if name in first["module"]:
            yield name, first["module"][name]
