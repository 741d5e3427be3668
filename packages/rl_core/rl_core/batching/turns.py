"""Turns of a batch: runs of targets with context between them, such as the answers of tools.

Shapes: U turns of all sequences in order; S sequences.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import Batch


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The turns of a batch; every target is in one."""

    lens_U: Tensor
    """int64 [U], targets of each turn."""
    counts_S: Tensor
    """int64 [S], turns of each sequence; 0 for one without targets."""
    state_ids_U: Tensor
    """int64 [U], equal for turns before which the same tokens stand, since the turn before or from the sequence's
    start: the prompt for a first turn, the observation for a later one."""


def find_turns(batch: Batch) -> Turns:
    """The turns of the batch: a target that does not follow another one begins a turn."""
    index_K, borders_S1 = batch.target_index_K.cpu(), batch.cu_seqlens_S1.cpu().long()
    starts = torch.ones_like(index_K, dtype=torch.bool)
    starts[1:] = index_K.diff() != 1  # the first target of a sequence is at least two places behind the one before
    first_U = starts.nonzero().flatten()
    lens_U = torch.cat([first_U, torch.tensor([index_K.numel()])]).diff()
    sequence_U = torch.searchsorted(borders_S1, index_K[first_U], right=True) - 1
    # Tokens before a turn begin after the last target of the turn before, or with the sequence.
    after_U = torch.cat([torch.zeros(1, dtype=torch.int64), index_K[first_U[1:] - 1] + 2])[: first_U.numel()]
    begin_U = torch.maximum(after_U, borders_S1[sequence_U])
    tokens = batch.input_ids_T.cpu().numpy()
    numbers: dict[bytes, int] = {}
    spans = zip(begin_U.tolist(), (index_K[first_U] + 1).tolist(), strict=True)
    states = [numbers.setdefault(tokens[begin:end].tobytes(), len(numbers)) for begin, end in spans]
    return Turns(
        lens_U=lens_U,
        counts_S=torch.bincount(sequence_U, minlength=batch.num_sequences),
        state_ids_U=torch.tensor(states, dtype=torch.int64),
    )
