"""The batch: sequences one after another in one row, without padding, with columns of values per token.

A train batch on the driver, a mini batch and the micro batch that a rank computes are all a `Batch`: `select` makes the
smaller ones.

Shapes: T tokens, S sequences (S1 = S + 1 borders), K targets, the tokens to predict, of all sequences in order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .._tensors import offsets, ranges
from ..errors import ArgumentError, ShapeError
from .prefixes import MIN_SHARED_TOKENS, PrefixOrder, PrefixTree, order_prefixes

IntRow: TypeAlias = Sequence[int] | NDArray[np.integer] | Tensor
BoolRow: TypeAlias = Sequence[bool] | NDArray[np.bool_] | Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Packed sequences with columns. Plain tensors, picklable, on the CPU until `to(device)`; `pack` makes it.

    Only `columns` changes after construction, through `add_columns`, and `per_token`.
    """

    input_ids_T: Tensor
    """int64 [T], the token ids of all sequences."""
    position_ids_T: Tensor
    """int64 [T], restarting at 0 in each sequence."""
    cu_seqlens_S1: Tensor
    """int32 [S + 1], start offsets of the sequences in T, and T at the end."""
    target_index_K: Tensor
    """int64 [K], the position in T whose hidden state predicts the target (one before it)."""
    target_ids_K: Tensor
    """int64 [K], the tokens to predict."""
    response_lens_S: Tensor
    """int64 [S], number of targets of each sequence, in order; may be 0."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """Values per target by name, [K] or [K, ...]."""
    per_sequence: Mapping[str, Tensor] = field(default_factory=dict)
    """Values per sequence by name, [S]: facts about a sample, such as its score."""
    per_token: dict[str, Tensor] = field(default_factory=dict)
    """Values per token by name, [T, ...], prompts included, such as the experts that computed it. They stay on the
    CPU."""
    images: tuple[str | None, ...] = ()
    """File of the images' features of each sequence, or None; empty if no sequence has images."""
    prefixes: PrefixTree | None = None
    """The tokens to compute if sequences share prefixes; None: all. Nothing else of the batch depends on it."""

    @property
    def num_sequences(self) -> int:
        """S, sequences without targets included."""
        return self.response_lens_S.numel()

    @property
    def num_tokens(self) -> int:
        """T, tokens of prompts and responses; each shared prefix counts once per sequence."""
        return self.input_ids_T.numel()

    @property
    def num_targets(self) -> int:
        """K, tokens to predict."""
        return self.target_ids_K.numel()

    @property
    def seq_lens_S(self) -> Tensor:
        """int64 [S], tokens of each sequence, with its prompt."""
        return self.cu_seqlens_S1.diff().long()

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that a model computes: each shared prefix counts once."""
        return self.num_tokens if self.prefixes is None else self.prefixes.num_tokens

    def add_columns(self, **columns: Tensor) -> None:
        """Adds [K] or [K, ...] columns as they are, float64 as float32.

        Raises `ShapeError` for a column of another length, `ArgumentError` for one that exists already.
        """
        for name, column_K in columns.items():
            if name in self.columns:
                raise ArgumentError("the column exists already", field=name)
            if column_K.shape[:1] != (self.num_targets,):
                allowed = f"({self.num_targets},), one value per target"
                raise ShapeError(field=name, value=tuple(column_K.shape), allowed=allowed)
            self.columns[name] = column_K.float() if column_K.dtype == torch.float64 else column_K

    def without_columns(self) -> "Batch":
        """The same sequences, with their values and without columns."""
        return replace(self, columns={})

    def order_prefixes(self, *, min_tokens: int = MIN_SHARED_TOKENS) -> PrefixOrder:
        """See `rl_core.order_prefixes`."""
        return order_prefixes(self.input_ids_T, self.cu_seqlens_S1, min_tokens=min_tokens)

    def with_prefixes(self, order: PrefixOrder | None = None, *, min_tokens: int = MIN_SHARED_TOKENS) -> "Batch":
        """The same batch, with the prefixes that its sequences share, if there are any.

        Args:
            order: the order of its sequences, which has found them already; None finds them.
        """
        tree = (order or self.order_prefixes(min_tokens=min_tokens)).tree(self.cu_seqlens_S1)
        return replace(self, prefixes=tree if tree.num_tokens < self.num_tokens else None)

    def select(self, sequences: Sequence[int]) -> "Batch":
        """The sequences at these indices, in the order given, with their columns and values, without `prefixes`."""
        chosen = torch.as_tensor(sequences, dtype=torch.int64)
        starts_S, lens_S = self.cu_seqlens_S1[:-1].long()[chosen], self.seq_lens_S[chosen]
        keep_T, keep_K = ranges(starts_S, lens_S), self.target_places(sequences)
        borders_S1 = offsets(lens_S)
        num_targets_S = self.response_lens_S[chosen]
        moved_S = borders_S1[:-1] - starts_S
        return Batch(
            input_ids_T=self.input_ids_T[keep_T],
            position_ids_T=self.position_ids_T[keep_T],
            cu_seqlens_S1=borders_S1.int(),
            target_index_K=self.target_index_K[keep_K] + moved_S.repeat_interleave(num_targets_S),
            target_ids_K=self.target_ids_K[keep_K],
            response_lens_S=num_targets_S,
            columns={name: column_K[keep_K] for name, column_K in self.columns.items()},
            per_sequence={name: values_S[chosen] for name, values_S in self.per_sequence.items()},
            per_token={name: values_T[keep_T] for name, values_T in self.per_token.items()},
            images=tuple(self.images[int(one)] for one in sequences) if self.images else (),
        )

    def target_places(self, sequences: Sequence[int]) -> Tensor:
        """int64, the places among the K of the targets of these sequences, in the order given."""
        chosen = torch.as_tensor(sequences, dtype=torch.int64)
        starts_S = offsets(self.response_lens_S)[:-1]
        return ranges(starts_S[chosen], self.response_lens_S[chosen])

    def split(self, values_K: Tensor) -> list[Tensor]:
        """A [K] tensor as one view per sequence, in order. Raises `ShapeError` for another length."""
        if values_K.shape[:1] != (self.num_targets,):
            raise ShapeError(field="values_K", value=tuple(values_K.shape), allowed=f"({self.num_targets},)")
        return list(values_K.split(self.response_lens_S.tolist()))

    def to(self, device: torch.device | str) -> "Batch":
        """A copy with every tensor but those of `per_token` on `device`; columns that are added to it are not in this
        batch."""
        moved: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        mappings: dict[str, Any] = {
            name: {key: value.to(device) for key, value in getattr(self, name).items()}
            for name in ("columns", "per_sequence")
        }
        prefixes = None if self.prefixes is None else self.prefixes.to(device)
        return replace(self, prefixes=prefixes, **moved, **mappings)


def pack(
    prompts: Sequence[IntRow],
    responses: Sequence[IntRow],
    *,
    masks: Sequence[BoolRow | None] | None = None,
    columns: Mapping[str, Tensor] | None = None,
    per_sequence: Mapping[str, Tensor] | None = None,
    per_token: Mapping[str, Tensor] | None = None,
    images: Sequence[str | None] = (),
) -> Batch:
    """Packs prompts, each followed by its response, in the order given into one row.

    Args:
        prompts: token ids that are not predicted: lists, arrays or CPU tensors. At least one, if the first response
            token is to be predicted.
        responses: token ids that follow each prompt; the targets.
        masks: for each response None, or one value per token: False keeps the token as context but not as a target,
            such as a tool's result.
        columns: [K] or [K, ...] by name.
        per_sequence: [S] by name.
        per_token: [T, ...] by name.
        images: for each sequence the file of its images' features, or None; empty if no sequence has images.

    Raises `ShapeError` for a mask, column or value of another length, a target without a token before it, and a
    sequence without tokens.
    """
    if len(prompts) != len(responses) or (masks is not None and len(masks) != len(prompts)):
        counts = (len(prompts), len(responses), len(masks or ()))
        raise ShapeError(field="prompts, responses, masks", value=counts, allowed="equally many")
    rows = [_int_row(row) for pair in zip(prompts, responses, strict=True) for row in pair]
    lens = np.array([len(row) for row in rows], np.int64).reshape(-1, 2)
    seq_lens = lens.sum(1)
    if not seq_lens.all():
        raise ShapeError("it has no tokens", field=f"sequence {int(seq_lens.argmin())}")
    borders = np.concatenate([[0], seq_lens.cumsum()])
    is_target_T = np.repeat(np.tile([False, True], len(lens)), lens.reshape(-1))
    for index, mask in enumerate(masks or ()):
        if mask is not None:
            is_target_T[borders[index] + lens[index, 0] : borders[index + 1]] = _mask_row(mask, index, lens[index, 1])
    if is_target_T[borders[:-1]].any():
        first = int(is_target_T[borders[:-1]].argmax())
        raise ShapeError("without a prompt its first response token cannot be predicted", field=f"sequence {first}")
    input_ids_T = np.concatenate(rows).astype(np.int64) if rows else np.zeros(0, np.int64)
    target_places = np.flatnonzero(is_target_T)
    batch = Batch(
        input_ids_T=torch.from_numpy(input_ids_T),
        position_ids_T=torch.from_numpy(np.arange(borders[-1]) - np.repeat(borders[:-1], seq_lens)),
        cu_seqlens_S1=torch.from_numpy(borders.astype(np.int32)),
        target_index_K=torch.from_numpy(target_places - 1),
        target_ids_K=torch.from_numpy(input_ids_T[target_places]),
        response_lens_S=torch.from_numpy(np.diff(np.searchsorted(target_places, borders))),
        per_sequence=dict(per_sequence or {}),
        per_token=dict(per_token or {}),
        images=tuple(images) if any(images) else (),
    )
    if images and len(images) != len(lens):
        raise ShapeError(field="images", value=len(images), allowed=f"{len(lens)}, one value per sequence")
    sizes = ((batch.per_sequence, len(lens), "sequence"), (batch.per_token, batch.num_tokens, "token"))
    for values, size, noun in sizes:
        for name, each in values.items():
            if each.shape[:1] != (size,):
                raise ShapeError(field=name, value=tuple(each.shape), allowed=f"({size},), one value per {noun}")
    batch.add_columns(**columns or {})
    return batch


def _int_row(row: IntRow) -> NDArray[np.integer]:
    array = row.numpy() if isinstance(row, Tensor) else np.asarray(row)
    return array.reshape(-1) if array.size else np.zeros(0, np.int64)


def _mask_row(mask: BoolRow, index: int, length: int) -> NDArray[np.bool_]:
    array = np.asarray(mask, dtype=np.bool_)
    if array.shape != (length,):
        raise ShapeError(field=f"mask of sequence {index}", value=array.shape, allowed=f"({length},)")
    return array
