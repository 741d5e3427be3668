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

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torch import Tensor

LOG2_E = math.log2(math.e)

# Maximum distance, in bits, of an lse above the reference of its row: 2^64 and 2^-64 fit float32 and bf16.
MARGIN_BITS = 64.0


@dataclass(frozen=True, kw_only=True)
class LogitSpec:
    """Transformation of raw logits into ``z``. Both numbers are positive; ``soft_cap`` is in units of raw logits."""

    temperature: float = 1.0
    soft_cap: float | None = None

    @property
    def bits(self) -> float:
        """log2(e) / temperature: ``u`` times it is ``z`` in bits."""
        return LOG2_E / self.temperature


@dataclass(frozen=True, kw_only=True)
class LogitInputs:
    """Inputs of the logits, and the targets: row numbers of the weight, -1 where another rank holds them.

    ``first_column``: number of the first row of ``weight_VH`` in the weight that ``targets_N`` refer to.
    """

    hidden_NH: Tensor
    weight_VH: Tensor
    bias_V: Tensor | None
    targets_N: Tensor
    spec: LogitSpec
    first_column: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """(N, V, H)"""
        return self.hidden_NH.shape[0], *self.weight_VH.shape

    def rows(self, rows: slice) -> "LogitInputs":
        """The inputs of these tokens."""
        return replace(self, hidden_NH=self.hidden_NH[rows], targets_N=self.targets_N[rows])

    def columns(self, start: int, stop: int) -> "LogitInputs":
        """The inputs of the columns [start, stop) of the logits."""
        bias_C = None if self.bias_V is None else self.bias_V[start:stop]
        weight_CH = self.weight_VH[start:stop]
        return replace(self, weight_VH=weight_CH, bias_V=bias_C, first_column=self.first_column + start)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Unnormalized probabilities of the first columns of ``V``, kept from the forward to the backward pass.

    ``shares``: consecutive column blocks ``[N, C]`` of ``2^(t - base)`` with ``t = z log2(e)``, in the input dtype. The
    backward pass overwrites each block and frees it after use.
    ``tile_lse``: lse in bits of each row and tile of ``tile_columns`` columns, in one ``[tiles, rows]`` block for every
    ``rows_per_block`` rows.
    ``reference_N``: the ``base`` of a row, in bits. In tiles whose lse is more than MARGIN_BITS above it, the base is
    that lse.
    ``whole``: all columns are kept. The reference is then the largest of some logits of the row, so that nearly always
    all tiles of the row share one base. Otherwise references are so low that each tile has its own.
    ``grad_memory_VH``: memory of the weight's gradient, which holds some of ``shares`` until the backward pass. Writing
    the gradient from row 0 on, in the order of the blocks, overwrites no block before it has been used.
    """

    shares: list[Tensor]
    tile_lse: tuple[Tensor, ...]
    tile_columns: int
    rows_per_block: int
    reference_N: Tensor
    whole: bool
    grad_memory_VH: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ShareOutput:
    """Memory to which a forward kernel writes a part of `Kept.shares`, and the references of its rows."""

    out_NC: Tensor
    reference_N: Tensor


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """Limit on the probabilities that the forward pass keeps: ``own_bytes`` bytes; None: what EXTRA_BYTES allows.

    ``use_grad_memory``: with ``own_bytes`` None, it may also keep them in the memory of the weight's gradient.
    """

    own_bytes: int | None = 0
    use_grad_memory: bool = False


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


class Needs(NamedTuple):
    """The requested gradients."""

    hidden: bool
    weight: bool
    bias: bool


KEEP_NOTHING = Keeping()
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of hidden, weight and bias, in the inputs' dtype
Reduce = Callable[[Tensor], object]  # sums a tensor over the ranks of a group in place


class Backend(Protocol):
    """Computes row statistics and gradients without materializing ``[N, V]``.

    ``keeping`` limits ``RowStats.kept``; a backend may keep nothing. ``reduce_hidden`` is called on hidden's gradient
    in the accumulation dtype, before rounding, for all rows at once or for one group of rows after another.
    """

    def forward(self, inputs: LogitInputs, keeping: Keeping) -> RowStats: ...

    def backward(
        self, inputs: LogitInputs, rows: RowGrads, needs: Needs, reduce_hidden: Reduce | None
    ) -> Gradients: ...
