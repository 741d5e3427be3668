"""What every backend takes and gives back, and the equations they share.

Shapes: ``N`` tokens that count (ignored ones are gone already), ``H`` hidden size, ``V`` vocabulary rows held here,
``C`` columns of one vocabulary chunk.

For token ``t`` and vocabulary row ``j``::

    a_tj = hidden_t . weight_j + bias_j                      (raw logit)
    u_tj = soft_cap * tanh(a_tj / soft_cap)                  (u = a without a soft cap)
    z_tj = u_tj / temperature
    lse_t = log sum_j exp(z_tj),   p_tj = exp(z_tj - lse_t),   mean_t = sum_j p_tj z_tj
    log_prob_t = z_{t, y_t} - lse_t,   entropy_t = lse_t - mean_t

Only ``lse``, ``mean`` and the target's ``z`` survive the forward pass. With ``g`` the incoming gradients::

    dz_tj = g_lp_t (1[j = y_t] - p_tj) - g_ent_t p_tj (z_tj - mean_t)
    da_tj = dz_tj / temperature * (1 - (u_tj / soft_cap)^2)
    d_hidden = da @ weight,   d_weight = da^T @ hidden,   d_bias = sum_t da_t
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

# Bits an lse may lie above its row's reference: 2^MARGIN_BITS, and what is as far below 1, fit float32 and bf16.
MARGIN_BITS = 64.0


@dataclass(frozen=True, kw_only=True)
class LogitSpec:
    """How raw logits become ``z``. Both numbers are positive; ``soft_cap`` is in raw-logit units."""

    temperature: float = 1.0
    soft_cap: float | None = None


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Probabilities that the forward pass left for the backward pass, for the first columns of ``V``.

    ``shares`` are blocks ``[N, C]``, one after another in columns, of ``2^(t - base)`` with ``t = z log2(e)`` in the
    input dtype, whose relative precision does not depend on how small a number is. ``base`` is the row's
    ``reference_N`` or, where that is more than MARGIN_BITS above it, the lse of the tile in bits (``tile_lse``: of each
    row and tile of ``tile_columns`` columns, one ``[tiles, rows]`` block for every ``rows_per_block`` rows). The
    backward pass overwrites the blocks and drops each when it is done with it.

    With ``whole`` every column is kept and a reference is the largest logit of some of the row's columns in bits, so
    that nearly always it is the base of the whole row; without, references are so low that every tile is its own base.

    ``lent_VH`` is memory for the weight's gradient in which some of ``shares`` lie: filling it from row 0 on, in the
    order of the blocks, overwrites no block before its turn is over.
    """

    shares: list[Tensor]
    tile_lse: tuple[Tensor, ...]
    tile_columns: int
    rows_per_block: int
    reference_N: Tensor
    whole: bool
    lent_VH: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Share:
    """Where a forward kernel leaves a block of Kept.shares, and the references of its rows."""

    out_NC: Tensor
    reference_N: Tensor


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """What the forward pass may leave behind: ``own_bytes`` of its own, or what EXTRA_BYTES allows (None).

    With ``lend`` and ``own_bytes`` None it may also use the memory that the weight's gradient will need anyway.
    """

    own_bytes: int | None = 0
    lend: bool = False


@dataclass(frozen=True, kw_only=True)
class RowStats:
    """What the forward pass keeps of each row of logits; all ``[N]``, float32 (float64 for float64 inputs).

    ``target_z_N`` is 0 where the target lies outside the rows held here (vocabulary parallel).
    """

    lse_N: Tensor
    mean_z_N: Tensor
    target_z_N: Tensor
    kept: Kept | None = None


@dataclass(frozen=True, kw_only=True)
class RowGrads:
    """What the backward pass needs of each row; all ``[N]`` in the dtype of the statistics.

    ``grad_entropy_N`` is None when nothing upstream used the entropy, which saves its arithmetic.
    """

    lse_N: Tensor
    mean_z_N: Tensor
    log_prob_N: Tensor
    grad_log_prob_N: Tensor
    grad_entropy_N: Tensor | None
    kept: Kept | None = None


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Gradients asked for (None where not), in the inputs' dtype."""

    hidden_NH: Tensor | None
    weight_VH: Tensor | None
    bias_V: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool


KEEP_NOTHING = Keeping()
Reduce = Callable[[Tensor], object]  # sums a tensor over the ranks of a group, in place


class Backend(Protocol):
    """One way to compute the row statistics and the gradients without holding ``[N, V]``.

    ``targets_N`` holds row numbers of ``weight_VH``, or -1 for a target that is not held here. ``keeping`` is what the
    forward pass may leave behind in ``RowStats.kept``; a backend may leave nothing. ``reduce_hidden`` is called on
    hidden's gradient in the accumulation dtype, all of it or some rows after others, before it is rounded.
    """

    def forward(
        self,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        spec: LogitSpec,
        keeping: Keeping,
    ) -> RowStats: ...

    def backward(
        self,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        spec: LogitSpec,
        rows: RowGrads,
        needs: Needs,
        reduce_hidden: Reduce | None = None,
    ) -> Gradients: ...
