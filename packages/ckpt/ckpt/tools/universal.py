"""Converts a ZeRO checkpoint to DeepSpeed's universal format: one file per tensor, for any stage and number of ranks.

    <out>/latest_universal
    <out>/<tag>/zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
    <out>/<tag>/zero/optimizer_state.pt
    <out>/<tag>/mp_rank_00_model_states.pt, zero_pp_rank_0_mp_rank_00_model_states.pt

DeepSpeed's own converter unpickles its input, and its output loads only at the stage of the input. This one reads with
`weights_only`, holds one tensor in memory at a time, writes the folder atomically, and its output loads at stages 1, 2
and 3.
"""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ExportError
from ..files import check_space, fsync_file, new_folder, write_text
from ..zero.zero_checkpoint import ZeroCheckpoint


@dataclass(frozen=True, kw_only=True)
class UniversalCheckpoint:
    """A written universal checkpoint. `num_bytes` counts fp32 weights and moments."""

    path: Path
    tag: str
    num_parameters: int
    num_bytes: int
    optimizer_steps: int


def write_universal(
    checkpoint: Path, out: Path, *, tag: str | None = None, overwrite: bool = False
) -> UniversalCheckpoint:
    """Write the universal checkpoint `out` from a DeepSpeed checkpoint of ZeRO-1, 2 or 3, without a process group.

    To resume from it, set `{"checkpoint": {"load_universal": true}}` in DeepSpeed's configuration and call
    `engine.load_checkpoint(out)`. `checkpoint` and `tag` are arguments of `ZeroCheckpoint`. The fp16 loss scale is not
    kept.

    Raises ShardError as `ZeroCheckpoint` does, CheckpointSpaceError when the disk is full, and ExportError when `out`
    exists and is not empty (unless `overwrite`). After an error `out` is unchanged.
    """
    source = ZeroCheckpoint(Path(checkpoint), tag)
    source.check()
    if not source.shapes:
        raise ExportError("no parameter was trained", field="checkpoint", value=str(source.folder))
    out, tag = Path(out), source.folder.name
    num_bytes = sum(4 * (1 + len(source.states_of(name))) * math.prod(shape) for name, shape in source.shapes.items())
    with new_folder(out, overwrite=overwrite) as partial:
        check_space(partial, num_bytes, estimate="fp32 weights and optimizer states")
        _write_parameters(source, partial / tag / "zero")
        model = partial / tag / "mp_rank_00_model_states.pt"
        _save({**source.metadata, "module": {**dict(source.frozen()), **source.buffers}}, model)
        shutil.copyfile(model, sharded := model.with_name(f"zero_pp_rank_0_{model.name}"))
        fsync_file(sharded)
        write_text(partial / "latest_universal", tag)
    return UniversalCheckpoint(
        path=out,
        tag=tag,
        num_parameters=len(source.shapes),
        num_bytes=num_bytes,
        optimizer_steps=source.optimizer_steps,
    )


def _write_parameters(source: ZeroCheckpoint, folder: Path) -> None:
    import torch

    step = torch.tensor(float(source.optimizer_steps))
    for name in source.shapes:
        for kind in ("weight", *source.states_of(name)):
            # Clone: torch.save of a view would write the whole mapped file.
            file = folder / name / ("fp32.pt" if kind == "weight" else f"{kind}.pt")
            _save({"param": source.whole(name, kind).clone()}, file)
        _save(step, folder / name / "step.pt")
    _save(_optimizer_state(source, step), folder / "optimizer_state.pt")


def _optimizer_state(source: ZeroCheckpoint, step: Any) -> dict[str, Any]:
    """The optimizer state without parameters: stages 1 and 2 read the outer part, stage 3 the nested one."""
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
