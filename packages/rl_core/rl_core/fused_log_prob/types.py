"""Interface and data types of the backends, and their equations.

Shapes: ``N`` tokens (without ignored ones), ``H`` hidden size, ``V`` vocabulary rows on this rank, ``C`` columns of one
vocabulary block.

For token ``t`` and vocabulary row ``j``::

    a_tj = hidden_t . weight_j + bias_j                      (raw logit)
    u_tj = soft_cap * tanh(a_tj / soft_cap)                  (u = a without a soft cap)
    z_tj = u_tj / temperature
    lse_t = log sum_j exp(z_tj),   p_tj = exp(z_tj - lse_t),   mean_t = sum_j p_tj z_tj
    log_prob_t = z_{t, y_t} - lse_t,   entropy_t = lse_t - mean_t

The forward pass saves only ``lse``, ``mean`` and the ``z`` of the target. With ``g`` the incoming gradients::

    dz_tj = g_lp_t (1[j = y_t] - p_tj) - g_ent_t p_tj (z_tj - mean_t)
    da_tj = dz_tj / temperature * (1 - (u_tj / soft_cap)^2)
    d_hidden = da @ weight,   d_weight = da^T @ hidden,   d_bias = sum_t da_t
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

# Maximum distance, in bits, of an lse above the reference of its row: 2^64 and 2^-64 fit float32 and bf16.
MARGIN_BITS = 64.0


@dataclass(frozen=True, kw_only=True)
class LogitSpec:
    """Transformation of raw logits into ``z``. Both numbers are positive; ``soft_cap`` is in units of raw logits."""

    temperature: float = 1.0
    soft_cap: float | None = None


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Unnormalized probabilities that the forward pass keeps for the backward pass, for the first columns of ``V``.

    ``shares`` are consecutive column blocks ``[N, C]`` of ``2^(t - base)`` with ``t = z log2(e)``, in the input dtype
    (the relative precision of a floating-point number does not depend on its size). ``base`` is the row's
    ``reference_N``; if the lse of the tile is more than MARGIN_BITS above it, ``base`` is that lse. ``tile_lse`` holds
    the lse in bits of each row and tile of ``tile_columns`` columns, in one ``[tiles, rows]`` block for every
    ``rows_per_block`` rows. The backward pass overwrites the blocks and frees each one after use.

    With ``whole`` every column is kept, and the reference is the largest logit of some columns of the row, in bits; it
    is nearly always the base of the whole row. Without ``whole`` references are so low that each tile has its own base.

    ``lent_VH`` is the memory of the weight's gradient, which holds some of ``shares`` until the backward pass. Writing
    the gradient from row 0 on, in the order of the blocks, overwrites no block before it has been used.
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
    """Output block of a forward kernel for `Kept.shares`, and the references of its rows."""

    out_NC: Tensor
    reference_N: Tensor


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """Limit on the memory that the forward pass may keep: ``own_bytes``, or (None) what EXTRA_BYTES allows.

    With ``lend`` and ``own_bytes`` None it may also use the memory of the weight's gradient.
    """

    own_bytes: int | None = 0
    lend: bool = False


@dataclass(frozen=True, kw_only=True)
class RowStats:
    """Statistics of each row of logits from the forward pass; all ``[N]``, float32 (float64 for float64 inputs).

    ``target_z_N`` is 0 where another rank holds the target (vocabulary parallel).
    """

    lse_N: Tensor
    mean_z_N: Tensor
    target_z_N: Tensor
    kept: Kept | None = None


@dataclass(frozen=True, kw_only=True)
class RowGrads:
    """Inputs of the backward pass for each row; all ``[N]`` in the dtype of the statistics.

    ``grad_entropy_N`` is None if the entropy has no gradient; its computation is then skipped.
    """

    lse_N: Tensor
    mean_z_N: Tensor
    log_prob_N: Tensor
    grad_log_prob_N: Tensor
    grad_entropy_N: Tensor | None
    kept: Kept | None = None


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """The requested gradients (others are None), in the dtype of the inputs."""

    hidden_NH: Tensor | None
    weight_VH: Tensor | None
    bias_V: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The requested gradients."""

    hidden: bool
    weight: bool
    bias: bool


KEEP_NOTHING = Keeping()
Reduce = Callable[[Tensor], object]  # sums a tensor over the ranks of a group in place


class Backend(Protocol):
    """Computes row statistics and gradients without materializing ``[N, V]``.

    ``targets_N`` are row numbers of ``weight_VH``, or -1 for targets that another rank holds. ``keeping`` limits
    ``RowStats.kept``; a backend may keep nothing. ``reduce_hidden`` is called on hidden's gradient in the accumulation
    dtype, before rounding, for all rows at once or for one group of rows after another.
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
