"""Sequence packing: micro batches of sequences one after another in one row, without padding.

Shapes: T packed tokens, S sequences (S1 = S + 1 borders), K predicted tokens (targets) of all sequences in order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ShapeError

IntRow: TypeAlias = Sequence[int] | NDArray[np.integer] | Tensor
FloatRow: TypeAlias = Sequence[float] | NDArray[np.floating] | Tensor
BoolRow: TypeAlias = Sequence[bool] | NDArray[np.bool_] | Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceData:
    """One sequence before packing; rows are 1-D lists, arrays or CPU tensors."""

    prompt_ids: IntRow
    """Token ids that are not predicted. At least one, if the first response token is to be predicted."""
    response_ids: IntRow
    """Token ids that follow the prompt."""
    columns: Mapping[str, FloatRow] = field(default_factory=dict)
    """Per-token values by name, each as long as `response_ids`."""
    response_mask: BoolRow | None = None
    """False keeps a response token as context but not as a target (such as a tool's result); None: all are targets."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """One packed micro batch. Plain tensors, picklable, on the CPU until `to(device)`."""

    input_ids_T: Tensor
    """int64 [T], the token ids of all sequences."""
    position_ids_T: Tensor
    """int64 [T], restarting at 0 in each sequence."""
    cu_seqlens_S1: Tensor
    """int32 [S + 1], start offsets of the sequences in T, and T at the end."""
    max_seqlen: int
    """Length of the longest sequence in tokens; 0 for an empty batch."""
    target_index_K: Tensor
    """int64 [K], the position in T whose hidden state predicts the target (one before it)."""
    target_ids_K: Tensor
    """int64 [K], the tokens to predict."""
    response_lens_S: Tensor
    """int64 [S], number of targets of each sequence, in order; may be 0."""
    columns: Mapping[str, Tensor]
    """Per-target values by name, each [K], or [K, ...] if added by `with_columns`."""

    @property
    def num_sequences(self) -> int:
        return self.response_lens_S.numel()

    @property
    def num_tokens(self) -> int:
        return self.input_ids_T.numel()

    @property
    def num_targets(self) -> int:
        return self.target_ids_K.numel()

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The same batch with every tensor on `device`."""
        moved: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved, columns={name: column.to(device) for name, column in self.columns.items()})

    def with_columns(self, **columns: Tensor) -> "PackedBatch":
        """A copy with these [K] or [K, ...] columns added or replaced. Raises `ShapeError` for another shape."""
        for name, column in columns.items():
            if column.shape[:1] != (self.num_targets,):
                raise ShapeError(f"column {name!r} has shape {tuple(column.shape)}; must be ({self.num_targets},)")
        return replace(self, columns={**self.columns, **columns})


def pack(
    sequences: Sequence[SequenceData],
    *,
    column_names: Sequence[str] | None = None,
    column_dtype: torch.dtype = torch.float32,
) -> PackedBatch:
    """Pack sequences, in the order given, into one row without padding.

    Every sequence must have the columns `column_names`, or those of the first sequence if it is None. With
    `column_names`, a micro batch without sequences has these columns too, as empty [0] tensors. Columns are converted
    to `column_dtype`.

    Raises `ShapeError` for a column or mask whose length differs from its response, a missing or unknown column, a
    target without a token before it, and a sequence without tokens.
    """
    names = tuple(column_names if column_names is not None else (sequences[0].columns if sequences else ()))
    input_ids, positions, targets, target_ids = [], [], [], []
    columns: dict[str, list[Tensor]] = {name: [] for name in names}
    lens, borders = [], [0]
    for index, sequence in enumerate(sequences):
        prompt, response = _int_row(sequence.prompt_ids), _int_row(sequence.response_ids)
        mask = _mask_of(sequence, index, response.numel())
        length = prompt.numel() + response.numel()
        if length == 0:
            raise ShapeError(f"sequence {index} has no tokens")
        if prompt.numel() == 0 and bool(mask[:1].any()):
            raise ShapeError(f"sequence {index} has no prompt, so its first response token cannot be predicted")
        _require_columns(sequence, index, names, response.numel())
        input_ids += [prompt, response]
        positions.append(torch.arange(length))
        where = mask.nonzero().squeeze(1)
        targets.append(where + (borders[-1] + prompt.numel() - 1))
        target_ids.append(response[where])
        for name in names:
            columns[name].append(torch.as_tensor(sequence.columns[name], dtype=column_dtype)[where])
        lens.append(where.numel())
        borders.append(borders[-1] + length)
    return PackedBatch(
        input_ids_T=_join(input_ids, torch.int64),
        position_ids_T=_join(positions, torch.int64),
        cu_seqlens_S1=torch.tensor(borders, dtype=torch.int32),
        max_seqlen=max((b - a for a, b in pairwise(borders)), default=0),
        target_index_K=_join(targets, torch.int64),
        target_ids_K=_join(target_ids, torch.int64),
        response_lens_S=torch.tensor(lens, dtype=torch.int64),
        columns={name: _join(parts, column_dtype) for name, parts in columns.items()},
    )


def unpack(batch: PackedBatch) -> list[SequenceData]:
    """The sequences of a packed batch, in order; `pack(unpack(batch))` equals `batch`.

    A packed batch does not store where a prompt ended: the response starts at the first target. So leading masked
    response tokens become part of the prompt. Columns are 0 where the mask is False.
    """
    borders = batch.cu_seqlens_S1.tolist()
    lens = batch.response_lens_S.tolist()
    token_index_K = batch.target_index_K + 1
    sequences, offset = [], 0
    for start, end, num_targets in zip(borders, borders[1:], lens, strict=False):
        where = token_index_K[offset : offset + num_targets]
        first = int(where[0]) if num_targets else end
        mask = torch.zeros(end - first, dtype=torch.bool, device=where.device)
        mask[where - first] = True
        columns = {}
        for name, column in batch.columns.items():
            values = column.new_zeros(end - first)
            values[where - first] = column[offset : offset + num_targets]
            columns[name] = values
        sequences.append(
            SequenceData(
                prompt_ids=batch.input_ids_T[start:first],
                response_ids=batch.input_ids_T[first:end],
                columns=columns,
                response_mask=mask,
            )
        )
        offset += num_targets
    return sequences


def unpack_column(batch: PackedBatch, column_K: Tensor) -> list[Tensor]:
    """Split a [K] tensor into one view per sequence, in order. Raises `ShapeError` for another shape."""
    if column_K.shape != (batch.num_targets,):
        raise ShapeError(f"column has shape {tuple(column_K.shape)}; must be ({batch.num_targets},)")
    return list(column_K.split(batch.response_lens_S.tolist()))


def _int_row(row: IntRow) -> Tensor:
    if isinstance(row, list | tuple):
        array = np.asarray(row)  # torch takes twice as long for a list
        if array.dtype.kind == "i":
            return torch.from_numpy(array.astype(np.int64, copy=False)).reshape(-1)
    return torch.as_tensor(row, dtype=torch.int64).reshape(-1)


def _join(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype)


def _mask_of(sequence: SequenceData, index: int, length: int) -> Tensor:
    if sequence.response_mask is None:
        return torch.ones(length, dtype=torch.bool)
    mask = torch.as_tensor(sequence.response_mask, dtype=torch.bool)
    if mask.shape != (length,):
        raise ShapeError(f"sequence {index}: response_mask has shape {tuple(mask.shape)}; must be ({length},)")
    return mask


def _require_columns(sequence: SequenceData, index: int, names: tuple[str, ...], length: int) -> None:
    if set(sequence.columns) != set(names):
        raise ShapeError(f"sequence {index} has columns {sorted(sequence.columns)}; must be {sorted(names)}")
    for name, column in sequence.columns.items():
        if len(column) != length:
            raise ShapeError(f"sequence {index}: column {name!r} has {len(column)} values for {length} response tokens")
