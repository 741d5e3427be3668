"""A batch class and a log-prob function to train with this package alone; simple and exact, but not fast.

A training run passes a fused log-prob function and its own batch class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import BatchError

if TYPE_CHECKING:
    from .batch import Prefixes


@dataclass(frozen=True, kw_only=True)
class SimpleBatch:
    """A minimal `TokenBatch`."""

    input_ids_T: Tensor
    position_ids_T: Tensor
    cu_seqlens_S1: Tensor
    target_index_K: Tensor
    target_ids_K: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    prefixes: Prefixes | None = None
    per_token: Mapping[str, Tensor] = field(default_factory=dict)
    images: Sequence[Any] = ()

    @classmethod
    def pack(
        cls,
        sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
        columns: Mapping[str, Sequence[float]] | None = None,
        images: Sequence[Any] = (),
    ) -> SimpleBatch:
        """Pack sequences of (prompt ids, response ids); every response token is a target.

        Args:
            columns: one number per target, in order, for the loss function.
            images: those of each sequence (see `TokenBatch`).

        Raises:
            BatchError: a sequence has no prompt.
        """
        ids: list[int] = []
        positions: list[int] = []
        boundaries = [0]
        index: list[int] = []
        targets: list[int] = []
        for number, (prompt, response) in enumerate(sequences):
            if not prompt:
                raise BatchError(f"sequence {number} has no prompt, so its first token cannot be predicted")
            first = len(ids) + len(prompt)
            ids += [*prompt, *response]
            positions += range(len(prompt) + len(response))
            boundaries.append(len(ids))
            index += range(first - 1, len(ids) - 1)
            targets += response
        return cls(
            input_ids_T=torch.tensor(ids, dtype=torch.int64),
            position_ids_T=torch.tensor(positions, dtype=torch.int64),
            cu_seqlens_S1=torch.tensor(boundaries, dtype=torch.int32),
            target_index_K=torch.tensor(index, dtype=torch.int64),
            target_ids_K=torch.tensor(targets, dtype=torch.int64),
            columns={name: torch.tensor(values, dtype=torch.float32) for name, values in (columns or {}).items()},
            images=tuple(images),
        )

    def to(self, device: torch.device | str) -> SimpleBatch:
        """The same batch on `device`."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        columns = {name: value.to(device) for name, value in self.columns.items()}
        return SimpleBatch(**{**vars(self), **moved, "columns": columns})


def dense_log_prob(
    hidden_KH: Tensor,
    weight_VH: Tensor,
    targets_K: Tensor,
    temperature: float,
    *,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(log_probs_K, entropy_K) of softmax(logits / temperature) in fp32; materializes the logits [K, V].

    logits = hidden @ weight.T + bias; with `soft_cap` c they become c * tanh(logits / c). A bias of -inf
    excludes a token.
    """
    logits_KV = torch.nn.functional.linear(hidden_KH, weight_VH, bias).float()
    if soft_cap is not None:
        logits_KV = soft_cap * torch.tanh(logits_KV / soft_cap)
    log_p_KV = (logits_KV / temperature).log_softmax(-1)
    entropy_K = -(log_p_KV.exp() * log_p_KV.clamp_min(-1e20)).sum(-1)  # 0 * -inf would be NaN
    return log_p_KV.gather(1, targets_K[:, None])[:, 0], entropy_K
