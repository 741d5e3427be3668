"""Reads a DeepSpeed checkpoint of ZeRO-1, 2 or 3 as whole tensors, without DeepSpeed and without executing pickles.

A checkpoint is `<folder>/<tag>/` with one or more `*_model_states.pt` and one `*_optim_states.pt` per rank. The latter
hold the fp32 master weights and the optimizer's states (Adam's two moments) in flat buffers, which `zero_layout`
describes.

Files are opened with `weights_only` and memory-mapped, so only the elements that are read are loaded. The few DeepSpeed
objects in them are replaced by inert ones.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from enum import Enum, IntEnum
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from ..errors import ShardError
from .zero_layout import Shape, ZeroLayout

if TYPE_CHECKING:
    import torch


_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_")
#: Keys of a model file that DeepSpeed writes itself; all others are the client state.
_DEEPSPEED_KEYS = {
    *("module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"),
    *("optimizer", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples"),
    *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "universal_checkpoint_info"),
    *("ds_config", "ds_version"),
}
_TENSOR_KEYS = {"module", "optimizer", "frozen_param_fragments"}
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class _Inert:
    """Stand-in for a DeepSpeed object; keeps its plain values."""

    def __new__(cls, *_: Any, **__: Any) -> _Inert:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _Stage(IntEnum):
    """Stand-in for DeepSpeed's enumeration of stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


def _member(enumeration: type, name: str) -> Enum:
    """A member of an enumeration by its name. No other attribute of anything is returned."""
    if not issubclass(enumeration, Enum) or name not in enumeration.__members__:
        raise UnpicklingError(f"{enumeration.__name__} has no member {name!r}")
    return enumeration.__members__[name]


#: Python 3.11.0 to 3.11.3, that of Debian 12 among them, pickles members of enumerations as calls of getattr.
ENUM_MEMBER = (_member, "builtins.getattr")

_STAND_INS = (
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Inert, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    ENUM_MEMBER,
)


def find_deepspeed_folder(path: Path, tag: str | None = None) -> Path:
    """The folder with the shards: `path` itself, its subfolder `tag`, or its only subfolder with shards.

    Raises ShardError when there is none, or when there are several and no `tag`.
    """
    if tag is not None:
        tagged = [folder for folder in (path / tag, path / tag / tag) if any(folder.glob("*_model_states.pt"))]
        if not tagged:
            raise ShardError(
                f"{path / tag} holds no DeepSpeed checkpoint (no *_model_states.pt)", field="tag", value=tag
            )
        return tagged[0]
    if any(path.glob("*_model_states.pt")):
        return path
    folders = sorted({file.parent for depth in ("*", "*/*") for file in path.glob(f"{depth}/*_model_states.pt")})
    if len(folders) != 1:
        names = ", ".join(folder.name for folder in folders)
        if folders:
            raise ShardError(f"{path} holds several DeepSpeed checkpoints", field="tag", value=None, allowed=names)
        raise ShardError("holds no DeepSpeed checkpoint (no *_model_states.pt)", field="path", value=str(path))
    return folders[0]


class DeepSpeedCheckpoint(ABC):
    """A checkpoint of DeepSpeed: what its first model file holds, and its trained parameters."""

    _model: dict[str, Any]
    layout: ZeroLayout

    @property
    def client_state(self) -> dict[str, Any]:
        """The client state passed to DeepSpeed's save_checkpoint."""
        return {name: value for name, value in self._model.items() if name not in _DEEPSPEED_KEYS}

    @property
    def metadata(self) -> dict[str, Any]:
        """All values of a rank's model file except tensors."""
        return {name: value for name, value in self._model.items() if name not in _TENSOR_KEYS}

    @property
    def counters(self) -> dict[str, int]:
        """DeepSpeed's counters: global_steps, global_samples, skipped_steps."""
        return {name: int(self._model[name]) for name in _COUNTERS if name in self._model}

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The model's persistent buffers."""
        module = self._model.get("module") or {}
        return {name: module[name] for name in self._model.get("buffer_names") or () if name in module}

    @property
    def tied(self) -> set[str]:
        """Second names of tied parameters."""
        tied = self._model.get("shared_params") or {}
        return set(tied if isinstance(tied, dict) else (pair[0] for pair in tied))

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape of every trained parameter by name, in the order of the groups; tied parameters once."""
        return self.layout.shapes

    @abstractmethod
    def read(self, name: str, kind: str = "weight", start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of the flattened parameter or of a state, in fp32; `stop` None: to its end.

        Do not write to the result: it may be memory of the mapped file. States that do not exist yet are zeros.
        Raises ShardError as `check` does.
        """

    def whole(self, name: str, kind: str = "weight") -> torch.Tensor:
        """The parameter or one of its states, in its shape, in fp32. Do not write to the result."""
        return self.read(name, kind).reshape(self.shapes[name])


class ZeroCheckpoint(DeepSpeedCheckpoint):
    """The trained parameters and the optimizer's state of a DeepSpeed checkpoint, of any stage and number of ranks.

    Reading takes memory only for the elements read. Only the first rank's files are opened until an element is read or
    `check` is called.
    """

    def __init__(self, path: Path, tag: str | None = None) -> None:
        """`path` is the folder passed to DeepSpeed's save_checkpoint, or the one with the files. Several need a `tag`.

        Raises ShardError for a missing or torn file, and for a checkpoint without ZeRO or with tensor parallelism.
        """
        self.folder = find_deepspeed_folder(Path(path), tag)
        self._model_files = sorted(self.folder.glob("*_model_states.pt"), key=_rank_of)
        self._optimizer_files = sorted(self.folder.glob("*_optim_states.pt"), key=_rank_of)
        if not self._optimizer_files:
            raise ShardError(
                f"{self.folder}: needs *_model_states.pt and *_optim_states.pt; is it a checkpoint of ZeRO-1 to 3?"
            )
        if any((match := _RANK.search(path.name)) and int(match[2]) for path in self._optimizer_files):
            raise ShardError(f"{self.folder}: was saved with tensor parallelism, which is not supported")
        first = load_file(self._optimizer_files[0])
        self._first: dict[str, Any] = first.get("optimizer_state_dict", {})
        self.deepspeed_config: Mapping[str, Any] = first.get("ds_config") or {}
        self.deepspeed_version = str(first.get("ds_version", ""))
        self._model = load_file(self._model_files[0])
        self.layout = self._read_layout()
        self._check_ranks()

    @property
    def loss_scaler(self) -> dict[str, Any]:
        """The values of the fp16 loss scaler (`cur_scale` and others); empty without one."""
        return dict(vars(self._first["loss_scaler"])) if "loss_scaler" in self._first else {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's settings (lr, betas, weight_decay, ...) of each group."""
        groups = self._base_state(self._first)["param_groups"]
        return [{name: value for name, value in group.items() if name != "params"} for group in groups]

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the optimizer's tensors of a parameter's size, such as Adam's moments; empty before its first step.
        Not every parameter needs to have each (`states_of`).

        Raises ShardError as `optimizer_steps` does.
        """
        return tuple(dict.fromkeys(kind for kinds in self._states_and_steps[0] for kind in kinds))

    def states_of(self, name: str) -> tuple[str, ...]:
        """Names of the optimizer's states of the parameter `name`.

        Raises ShardError as `check` does.
        """
        weights = self._buffers["weight"]
        span = next(self.layout.spans(name, 0, 1, _sizes(weights)))
        return tuple(kind for kind in self.states if self._buffers[kind][span.rank][span.buffer] is not None)

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps in the states; 0 if there are none yet.

        Raises ShardError when the optimizer's groups differ.
        """
        return self._states_and_steps[1]

    @cached_property
    def _states_and_steps(self) -> tuple[list[tuple[str, ...]], int]:
        """(names of the states of each flat buffer, number of steps)."""
        base = self._base_state(self._first)
        params = [(group, param) for group in base["param_groups"] for param in group["params"]]
        names, steps = [], set()
        for (group, param), weight in zip(params, self._first[self._weights], strict=True):
            state = base["state"].get(param) or {}
            # Scales of quantized states and other small tensors are no states of elements.
            names.append(tuple(sorted(name for name in state if 2 * _numel(state[name]) > weight.numel())))
            steps.add(int(state.get("step", group.get("step", 0))) if state else 0)
        if len(steps) > 1 or len({bool(kinds) for kinds in names}) > 1:
            raise ShardError(
                f"{self.folder}: parameter groups have states {names} and numbers of steps {sorted(steps)}"
            )
        return names, max(steps, default=0)

    def read(self, name: str, kind: str = "weight", start: int = 0, stop: int | None = None) -> torch.Tensor:
        import torch

        if stop is None:
            stop = math.prod(self.shapes[name])
        buffers = self._buffers.get(kind)
        if buffers is None:
            return torch.zeros(stop - start)
        spans = self.layout.spans(name, start, stop, _sizes(self._buffers["weight"]))
        parts = []
        for span in spans:
            buffer = buffers[span.rank][span.buffer]
            if buffer is None:
                raise ShardError(f"{self.folder}: {name} has no state {kind}", field="kind", value=kind)
            parts.append(buffer[span.start : span.stop].float())
        return parts[0] if len(parts) == 1 else torch.cat([torch.empty(0), *parts])

    def check(self) -> None:
        """Open all files and compare the buffers' sizes with the parameters' shapes; reads no elements.

        Raises ShardError for missing, torn or foreign files, for sizes that differ, and for states that DeepSpeed
        stores elsewhere (on NVMe).
        """
        _ = self._buffers, self._models

    def frozen(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of the untrained weights that the checkpoint holds, in their stored dtype."""
        import torch

        fragments = self._model.get("frozen_param_fragments") or {}
        for name, shape in (self._model.get("frozen_param_shapes") or {}).items():
            if name in fragments:
                parts = [rank["frozen_param_fragments"][name].reshape(-1) for rank in self._models]
                yield name, torch.cat(parts)[: math.prod(shape)].reshape(tuple(shape))
        # Stages 1 and 2 store whole frozen weights in the module; stage 3 stores empty ones there.
        for name, tensor in (self._model.get("module") or {}).items():
            if self.layout.stage < 3 and name not in self.shapes and name not in self.buffers:
                yield name, tensor

    def _read_layout(self) -> ZeroLayout:
        stage = self._first.get("zero_stage")
        if stage is None:  # the optimizer that replaces ZeRO-1 for bf16 with fp32 gradients does not store it
            stage = 1 if "single_partition_of_fp32_groups" in self._first else 0
        count = self._first.get("partition_count", 0)
        if stage not in (1, 2, 3):
            raise ShardError(f"{self.folder}: has ZeRO stage {int(stage)}; supported are 1, 2 and 3")
        paddings = self._first.get("param_alignment_paddings")
        return ZeroLayout(
            stage=int(stage),
            num_ranks=max(count) if isinstance(count, list) else int(count),
            groups=tuple({n: tuple(shape) for n, shape in group.items()} for group in self._model["param_shapes"]),
            paddings=None if paddings is None else tuple(map(tuple, paddings)),
        )

    def _check_ranks(self) -> None:
        stage, num_ranks = self.layout.stage, self.layout.num_ranks
        for kind, files, expected in (
            ("optim", self._optimizer_files, num_ranks),
            ("model", self._model_files, num_ranks if stage == 3 else 1),
        ):
            ranks = [_rank_of(path) for path in files]
            if ranks != list(range(expected)):
                raise ShardError(
                    f"{self.folder}: was saved by {num_ranks} ranks at stage {stage}; there are *_{kind}_states.pt of "
                    f"ranks {ranks}, expected {list(range(expected))}"
                )

    def _base_state(self, shard: Mapping[str, Any]) -> Mapping[str, Any]:
        base = shard["optimizer_state_dict" if self.layout.stage == 3 else "base_optimizer_state"]
        if not isinstance(base, dict) or "state" not in base:
            raise ShardError(f"{self.folder}: was saved with DeepSpeed's elastic_checkpoint, which is not supported")
        return base

    @cached_property
    def _models(self) -> list[dict[str, Any]]:
        """The model files of all ranks if they hold parts of frozen weights, else only the first."""
        parts = self._model_files[1:] if self._model.get("frozen_param_fragments") else []
        return [self._model, *map(load_file, parts)]

    @cached_property
    def _buffers(self) -> dict[str, list[list[torch.Tensor | None]]]:
        """Flat buffers of each rank, by `weight` and the names of `states`; None for a state that they do not have."""
        zero = self.deepspeed_config.get("zero_optimization") or {}
        if (zero.get("offload_optimizer") or {}).get("device") == "nvme":
            raise ShardError(
                f"{self.folder}: its optimizer was on NVMe, which DeepSpeed stores in files of its own; load it with "
                "DeepSpeed, with the same number of ranks and the same stage"
            )
        shards = [self._first]
        shards += [load_file(path).get("optimizer_state_dict", {}) for path in self._optimizer_files[1:]]
        buffers: dict[str, list[list[torch.Tensor | None]]] = {
            "weight": [[piece.detach().reshape(-1) for piece in shard[self._weights]] for shard in shards]
        }
        buffers |= {kind: [self._state(shard, kind) for shard in shards] for kind in self.states}
        for ranks in buffers.values():
            try:
                self.layout.check(_sizes(ranks, otherwise=buffers["weight"]))
            except ShardError as error:
                raise error.under(str(self.folder)) from None
        return buffers

    @property
    def _weights(self) -> str:
        return "fp32_flat_groups" if self.layout.stage == 3 else "single_partition_of_fp32_groups"

    def _state(self, shard: Mapping[str, Any], kind: str) -> list[torch.Tensor | None]:
        base = self._base_state(shard)
        try:
            order = [param for group in base["param_groups"] for param in group["params"]]
            return [
                base["state"][param][kind].reshape(-1) if kind in kinds else None
                for param, kinds in zip(order, self._states_and_steps[0], strict=True)
            ]
        except KeyError as error:
            raise ShardError(f"{self.folder}: the optimizer state of a rank lacks {error}") from error


def _sizes(
    ranks: list[list[torch.Tensor | None]], otherwise: list[list[torch.Tensor | None]] | None = None
) -> list[list[int]]:
    """Elements of each buffer; `otherwise` has those of buffers that do not exist."""
    pairs = (zip(rank, rest, strict=True) for rank, rest in zip(ranks, otherwise or ranks, strict=True))
    return [[_numel(rest if piece is None else piece) for piece, rest in rank] for rank in pairs]


def _numel(value: Any) -> int:
    """Elements of a tensor; 0 of anything else."""
    return int(value.numel()) if hasattr(value, "numel") else 0


def _rank_of(path: Path) -> int:
    match = _RANK.search(path.name)
    return int(match[1]) if match else 0


def load_file(path: Path) -> Any:
    """The content of a file of DeepSpeed, memory-mapped.

    Raises ShardError when it is torn or foreign.
    """
    import torch

    try:
        with torch.serialization.safe_globals(list(_STAND_INS)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many types for torn or foreign files
        raise ShardError(f"cannot be read safely: {str(error).splitlines()[0]}", value=str(path)) from error
