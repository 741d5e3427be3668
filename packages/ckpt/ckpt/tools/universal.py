"""DeepSpeed's universal checkpoint out of a sharded one: whole tensors a file, for DeepSpeed at any stage and ranks.

    <out>/latest_universal
    <out>/<tag>/zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
    <out>/<tag>/zero/optimizer_state.pt
    <out>/<tag>/mp_rank_00_model_states.pt, zero_pp_rank_0_mp_rank_00_model_states.pt

DeepSpeed's converter unpickles what it is given and writes a folder for the stage it came from. Here files are read
with `weights_only`, one tensor is in memory at a time, the folder appears whole, and it loads at stages 1, 2 and 3.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ExportError
from ..files import check_space, fsync_file, new_folder, write_text
from ..zero.zero_checkpoint import KINDS, ZeroCheckpoint

__all__ = ["UniversalCheckpoint", "write_universal"]

_FILES = {"weight": "fp32.pt", "exp_avg": "exp_avg.pt", "exp_avg_sq": "exp_avg_sq.pt"}


@dataclass(frozen=True, kw_only=True)
class UniversalCheckpoint:
    """What was written. `num_bytes` counts fp32 weights and moments."""

    path: Path
    tag: str
    num_parameters: int
    num_bytes: int
    adam_steps: int


def write_universal(
    checkpoint: Path,
    out: Path,
    *,
    tag: str | None = None,
    overwrite: bool = False,
    on_tensor: Callable[[str, int, int], None] | None = None,
) -> UniversalCheckpoint:
    """Write the universal checkpoint `out` from a DeepSpeed checkpoint of ZeRO-1, 2 or 3; no process group needed.

    To continue from it: `{"checkpoint": {"load_universal": true}}` in DeepSpeed's configuration, then
    `engine.load_checkpoint(out)`. `checkpoint` and `tag` are as for `ZeroCheckpoint`. `on_tensor` is told each
    parameter's name, the bytes written of it, and those of all. fp16's loss scale starts anew.

    Raises ShardError as `ZeroCheckpoint` does, CheckpointSpaceError for a disk without room, and ExportError when `out`
    exists and is not empty (unless `overwrite`). On an error nothing is left.
    """
    source = ZeroCheckpoint(Path(checkpoint), tag)
    source.check()
    if not source.shapes:
        raise ExportError(f"{source.folder}: no parameter was trained")
    out, tag = Path(out), source.folder.name
    num_bytes = _num_bytes(*source.shapes.values())
    with new_folder(out, overwrite=overwrite) as partial:
        check_space(partial, num_bytes, estimate="fp32 weights and two moments")
        for name in _write_parameters(source, partial / tag / "zero"):
            if on_tensor is not None:
                on_tensor(name, _num_bytes(source.shapes[name]), num_bytes)
        model = partial / tag / "mp_rank_00_model_states.pt"
        _save({**source.metadata, "module": {**dict(source.frozen()), **source.buffers}}, model)
        shutil.copyfile(model, sharded := model.with_name(f"zero_pp_rank_0_{model.name}"))
        fsync_file(sharded)
        write_text(partial / "latest_universal", tag)
    return UniversalCheckpoint(
        path=out, tag=tag, num_parameters=len(source.shapes), num_bytes=num_bytes, adam_steps=source.adam_steps
    )


def _write_parameters(source: ZeroCheckpoint, folder: Path) -> Iterator[str]:
    """Write what `folder` is to hold; yields the name of each parameter that is written."""
    import torch

    step = torch.tensor(float(source.adam_steps))
    for name in source.shapes:
        for kind in KINDS:
            # A copy: saving a view of the mapped file would save all of the file.
            _save({"param": source.whole(name, kind).clone()}, folder / name / _FILES[kind])
        _save(step, folder / name / "step.pt")
        yield name
    _save(_optimizer_state(source, step), folder / "optimizer_state.pt")


def _num_bytes(*shapes: tuple[int, ...]) -> int:
    return sum(4 * len(KINDS) * math.prod(shape) for shape in shapes)


def _optimizer_state(source: ZeroCheckpoint, step: Any) -> dict[str, Any]:
    """What DeepSpeed reads besides the parameters' own: stages 1 and 2 the upper part, stage 3 the nested one."""
    groups = [{**settings, "params": [index]} for index, settings in enumerate(source.param_groups)]
    return {
        "ds_version": source.deepspeed_version,
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups},
    }


def _save(value: object, path: Path) -> None:
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    fsync_file(path)
