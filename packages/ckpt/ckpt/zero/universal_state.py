"""Reads a universal checkpoint of DeepSpeed (`ds_to_universal`, `write_universal`) without executing pickles.

<folder>/zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
<folder>/mp_rank_00_model_states.pt or zero_pp_rank_0_mp_rank_00_model_states.pt
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plinth_base.errors import listed

from ..errors import ShardError
from .zero_checkpoint import DeepSpeedCheckpoint, ZeroCheckpoint, find_deepspeed_folder, load_file
from .zero_layout import ZeroLayout

if TYPE_CHECKING:
    import torch

_WEIGHT = "fp32"


class UniversalState(DeepSpeedCheckpoint):
    """The trained parameters and the optimizer's state of a universal checkpoint, as `ZeroCheckpoint` has them. Reading
    takes memory only for the elements read."""

    def __init__(self, path: Path, tag: str | None = None) -> None:
        """`path` is the folder that was written, or the one with `zero/`. Several need a `tag`.

        Raises ShardError for a missing or torn file.
        """
        self.folder = find_deepspeed_folder(Path(path), tag)
        self._model = load_file(min(self.folder.glob("*_model_states.pt")))
        self._parameters = {file.parent.name: file.parent for file in sorted(self.folder.glob(f"zero/*/{_WEIGHT}.pt"))}
        if not self._parameters:
            raise ShardError(f"{self.folder}: has no zero/<parameter>/{_WEIGHT}.pt")
        self.deepspeed_config: Mapping[str, Any] = {}
        self.loss_scaler: dict[str, Any] = {}
        groups = [{n: tuple(shape) for n, shape in group.items()} for group in self._model.get("param_shapes") or ()]
        shapes = {name: shape for group in groups for name, shape in group.items()}
        if differing := shapes.keys() ^ (self._parameters.keys() - self.tied):
            raise ShardError(
                f"{self.folder}: its model file and zero/ have other parameters: {listed(sorted(differing))}"
            )
        self.layout = ZeroLayout(stage=0, num_ranks=0, groups=tuple(groups))

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the optimizer's states; empty before its first step."""
        return tuple(dict.fromkeys(kind for name in self.shapes for kind in self.states_of(name)))

    def states_of(self, name: str) -> tuple[str, ...]:
        """Names of the optimizer's states of the parameter `name`."""
        kinds = (file.stem for file in sorted(self._parameters[name].glob("*.pt")))
        return tuple(kind for kind in kinds if kind not in (_WEIGHT, "step"))

    @cached_property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps in the states; 0 if there are none.

        Raises ShardError when parameters have different numbers.
        """
        files = [folder / "step.pt" for folder in self._parameters.values()]
        steps = {int(load_file(file)) for file in files if file.is_file()}
        if len(steps) > 1:
            raise ShardError(f"{self.folder}: parameters have different numbers of steps: {sorted(steps)}")
        return steps.pop() if steps else self._global_steps()

    def _global_steps(self) -> int:
        """The number that a conversion states once for all parameters."""
        file = self.folder / "zero" / "optimizer_state.pt"
        state = load_file(file) if self.states and file.is_file() else {}
        nested = (state.get("optimizer_state_dict") or {}).get("state") or {}
        places = [
            next(iter(nested.values()), {}),
            *state.get("param_groups", ())[:1],
        ]  # DeepSpeed's own Adam: the group
        return int(next((place["step"] for place in places if "step" in place), 0))

    def read(self, name: str, kind: str = "weight", start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self._tensor(name, kind)[start:stop].float()

    def check(self) -> None:
        """Open all files and compare their sizes with the parameters' shapes; reads no elements.

        Raises ShardError for missing or torn files, and for sizes that differ.
        """
        for name in self.shapes:
            for kind in ("weight", *self.states_of(name)):
                self._tensor(name, kind)

    def _tensor(self, name: str, kind: str) -> torch.Tensor:
        file = self._parameters[name] / f"{_WEIGHT if kind == 'weight' else kind}.pt"
        content = load_file(file)
        tensor: torch.Tensor = (content["param"] if isinstance(content, Mapping) else content).reshape(-1)
        if tensor.numel() != math.prod(self.shapes[name]):
            raise ShardError(field=str(file), value=tensor.numel(), allowed=f"{math.prod(self.shapes[name])} elements")
        return tensor


def open_deepspeed(path: Path, tag: str | None = None) -> ZeroCheckpoint | UniversalState:
    """The checkpoint in `path`, of ZeRO-1, 2 or 3 or universal, whoever wrote it.

    Raises ShardError for a missing or torn file, as both classes do.
    """
    is_universal = (find_deepspeed_folder(Path(path), tag) / "zero").is_dir()
    return UniversalState(path, tag) if is_universal else ZeroCheckpoint(path, tag)
