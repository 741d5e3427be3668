"""Padded tensors of drawn sequences, as most trainers take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from .strategies import TokenSequence


@dataclass(frozen=True, kw_only=True)
class PaddedBatch:
    """Prompts and responses in one right-padded tensor."""

    input_ids_BL: Tensor
    """int64."""
    prompt_lens_B: Tensor
    """int64."""
    total_lens_B: Tensor
    """Prompt and response, int64."""


def pad(sequences: Sequence[TokenSequence], *, pad_id: int = 0, num_extra: int = 0) -> PaddedBatch:
    """The sequences as right-padded tensors.

    Results that depend on `pad_id` or `num_extra` include padding.

    Args:
        pad_id: an ordinary id finds more than a special one, which a model or a loss may ignore.
        num_extra: padding beyond the longest sequence.
    """
    import torch

    length = max(len(sequence.ids) for sequence in sequences) + num_extra
    rows = [[*sequence.ids, *[pad_id] * (length - len(sequence.ids))] for sequence in sequences]
    return PaddedBatch(
        input_ids_BL=torch.tensor(rows),
        prompt_lens_B=torch.tensor([len(sequence.prompt_ids) for sequence in sequences]),
        total_lens_B=torch.tensor([len(sequence.ids) for sequence in sequences]),
    )
