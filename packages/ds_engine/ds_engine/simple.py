"""Enough to train with this package alone: a batch class, and log-probs through plain logits.

Small and exact, not fast: a real run injects a fused log-prob function and packs with its own batch class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from .errors import BatchError

__all__ = ["SimpleBatch", "dense_log_prob"]


@dataclass(frozen=True, kw_only=True)
class SimpleBatch:
    """The fields of `TokenBatch`, nothing more."""

    input_ids_T: Tensor
    position_ids_T: Tensor
    cu_seqlens_S1: Tensor
    max_seqlen: int
    target_index_K: Tensor
    target_ids_K: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def pack(
        cls,
        sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
        columns: Mapping[str, Sequence[float]] | None = None,
    ) -> SimpleBatch:
        """Put sequences of (prompt ids, response ids) one after another; every response token is a target.

        Args:
            columns: one number per target, in order, handed to the loss function.

        Raises:
            BatchError: a sequence without a prompt.
        """
        ids: list[int] = []
        positions: list[int] = []
        borders = [0]
        index: list[int] = []
        targets: list[int] = []
        for number, (prompt, response) in enumerate(sequences):
            if not prompt:
                raise BatchError(f"sequence {number} has no prompt: nothing would predict its first token")
            first = len(ids) + len(prompt)
            ids += [*prompt, *response]
            positions += range(len(prompt) + len(response))
            borders.append(len(ids))
            index += range(first - 1, len(ids) - 1)
            targets += response
        return cls(
            input_ids_T=torch.tensor(ids, dtype=torch.int64),
            position_ids_T=torch.tensor(positions, dtype=torch.int64),
            cu_seqlens_S1=torch.tensor(borders, dtype=torch.int32),
            max_seqlen=max((end - start for start, end in pairwise(borders)), default=0),
            target_index_K=torch.tensor(index, dtype=torch.int64),
            target_ids_K=torch.tensor(targets, dtype=torch.int64),
            columns={name: torch.tensor(values, dtype=torch.float32) for name, values in (columns or {}).items()},
        )

    def to(self, device: torch.device | str) -> SimpleBatch:
        """The same batch on `device`."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        columns = {name: value.to(device) for name, value in self.columns.items()}
        return SimpleBatch(**{**vars(self), **moved, "columns": columns})


def dense_log_prob(
    hidden_KH: Tensor, weight_VH: Tensor, targets_K: Tensor, temperature: float, *, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(log_probs_K, entropy_K) of softmax(hidden @ weight.T / temperature), fp32, through a [K, V] tensor of logits."""
    logits_KV = torch.nn.functional.linear(hidden_KH, weight_VH, bias).float() / temperature
    log_p_KV = logits_KV.log_softmax(-1)
    entropy_K = -(log_p_KV.exp() * log_p_KV).sum(-1)
    return log_p_KV.gather(1, targets_K[:, None])[:, 0], entropy_K
