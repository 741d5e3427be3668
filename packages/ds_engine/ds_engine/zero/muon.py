"""Muon for matrices, AdamW for everything else (embeddings, heads, norms, biases).

    B = momentum B + (1 - momentum) G;   U = NS((1 - momentum) G + momentum B)  (nesterov; otherwise NS(B))
    W = W - lr weight_decay W - lr scale U

NS is the Newton-Schulz iteration that pulls all singular values of a matrix toward 1. `scale` is 0.2 sqrt(max(rows,
columns)) for `adjust_lr_fn="match_rms_adamw"`, so that AdamW's learning rates fit, and sqrt(max(1, rows / columns))
for "original".

ZeRO cuts matrices between ranks. Momentum and weights stay cut: each rank updates its pieces, sends them to the
matrix's owner, which iterates on the whole, and gets its pieces of the result. Owners share the work by its cost. All
ranks, stages and cuts therefore compute the same step from the same gradients, up to rounding.

Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is scalable
for LLM training", 2025, section 2.2. `torch.optim.Muon` has the same options and names.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..optimizers import MATRIX_ROUND
from .adamw import AdamW

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_MIN_NORM = 1e-7
_ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One matrix, or a stack of them, and its cut."""

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, int], ...]
    """[start, stop) of the elements that each rank has; empty ranges where it has none."""
    offset: int
    """Place of this rank's elements in its flat tensor."""

    @property
    def cost(self) -> int:
        """Multiplications of an iteration, up to a factor: 2 m m n + m m m, m the shorter side."""
        short, long = sorted(self.shape[-2:])
        return math.prod(self.shape[:-2]) * short * short * (2 * long + short)


class Muon(AdamW):
    """Groups with `matrices=True` have flat tensors of matrices, all others are AdamW's.

    `adam_lr` is the learning rate of AdamW's groups, `lr` if None; schedules scale both alike.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        adam_lr: float | None = None,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum {momentum} is not in [0, 1)")
        if not 1 <= operator.index(ns_steps) < 100:  # the trial of options steps no matrices
            raise ValueError(f"ns_steps {ns_steps} is not in [1, 100)")
        if adjust_lr_fn not in _ADJUSTMENTS:
            raise ValueError(f"adjust_lr_fn {adjust_lr_fn!r} is none of {', '.join(_ADJUSTMENTS)}")
        if adam_lr is not None and not adam_lr > 0:
            raise ValueError(f"adam_lr {adam_lr} is not positive")
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self._momentum, self._nesterov, self._ns_steps = momentum, nesterov, ns_steps
        self._adjust = _ADJUSTMENTS[adjust_lr_fn]
        self._matrices: dict[Tensor, list[Matrix]] = {}
        self._group: Any = None
        self._device = torch.device("cpu")
        for group in self.param_groups:
            group.setdefault("matrices", False)
            if adam_lr is not None and not group["matrices"]:
                group["lr_scale"] = adam_lr / lr

    def bind(
        self,
        flats: Sequence[tuple[Tensor, Sequence[tuple[str, tuple[int, ...], int, int, int]]]],
        *,
        group: Any = None,
        device: torch.device,
    ) -> None:
        """Tell what the flat tensors of matrices hold. Collective.

        Args:
            flats: each flat tensor of this rank with the pieces in it: name of the matrix, its shape, start and stop of
                its flattened elements, offset in the flat tensor.
            group: process group over which the flat tensors are cut; None: the default one.
            device: device of the iterations.
        """
        self._group, self._device = group, device
        held = [{piece[0]: piece[1:4] for piece in pieces} for _, pieces in flats]
        of_ranks: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(of_ranks, held, group=group)
        for index, (flat, pieces) in enumerate(flats):
            offsets = {piece[0]: piece[4] for piece in pieces}
            shapes = {name: piece[0] for rank in of_ranks for name, piece in rank[index].items()}
            self._matrices[flat] = [
                Matrix(
                    shape=tuple(shape),
                    cuts=tuple(rank[index].get(name, (shape, 0, 0))[1:] for rank in of_ranks),
                    offset=offsets.get(name, 0),
                )
                for name, shape in shapes.items()
            ]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient. Collective."""
        assert closure is None, "DeepSpeed passes none"
        hidden = []
        for group in self.param_groups:
            for flat in group["params"] if group["matrices"] else ():
                self._step_matrices(flat, group["lr"], group["weight_decay"])
                hidden.append((flat, flat.grad))
                flat.grad = None  # hides it from AdamW
        super().step()
        for flat, gradient in hidden:
            flat.grad = gradient

    def _step_matrices(self, flat: Tensor, lr: float, weight_decay: float) -> None:
        gradient = flat.grad
        assert gradient is not None, "all ranks have gradients of all matrices"
        if self.grad_scale is not None:
            gradient.div_(self.grad_scale)
        state = self.state[flat]
        if "momentum_buffer" not in state:
            # torch's AdamW looks for the number of steps in every state that it loads.
            state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
            state["momentum_buffer"] = torch.zeros_like(flat)
        state["step"] += 1
        momentum: Tensor = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - self._momentum)
        update = gradient.lerp_(momentum, self._momentum) if self._nesterov else momentum
        flat.add_(flat, alpha=-lr * weight_decay)
        for matrices in rounds(self._matrices[flat], dist.get_world_size(self._group)):
            for matrix, piece in zip(matrices, self._orthogonalized(matrices, update), strict=True):
                scale = lr * self._adjust(*matrix.shape[-2:])
                _piece(flat, matrix, dist.get_rank(self._group)).add_(piece.to(flat), alpha=-scale)

    def _orthogonalized(self, matrices: Sequence[Matrix], update: Tensor) -> list[Tensor]:
        """This rank's pieces of the orthogonalized matrices, whose pieces are in the flat tensor `update`."""
        world_size, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        owners = assign([matrix.cost for matrix in matrices], world_size)
        by_owner = sorted(range(len(matrices)), key=lambda index: owners[index])
        mine = [matrix for matrix, owner in zip(matrices, owners, strict=True) if owner == rank]
        dtype = iteration_dtype(self._device)
        sent = [_piece(update, matrices[index], rank).to(self._device, dtype) for index in by_owner]
        to_owners = [
            sum(_size(matrices[i], rank) for i in by_owner if owners[i] == owner) for owner in range(world_size)
        ]
        from_ranks = [sum(_size(matrix, source) for matrix in mine) for source in range(world_size)]
        received = self._exchange(sent, to_owners, from_ranks)
        # From each rank in turn its pieces of all matrices of this owner.
        pieces = iter(received.split([_size(matrix, source) for source in range(world_size) for matrix in mine]))
        parts: list[list[Tensor]] = [[] for _ in mine]
        for _ in range(world_size):
            for collected in parts:
                collected.append(next(pieces))
        results = _by_shape([torch.cat(one).view(m.shape) for m, one in zip(mine, parts, strict=True)], self._ns_steps)
        replies = [
            result[slice(*matrix.cuts[source])]
            for source in range(world_size)
            for matrix, result in zip(mine, results, strict=True)
        ]
        returned = self._exchange(replies, from_ranks, to_owners).split([len(piece) for piece in sent])
        by_index = dict(zip(by_owner, returned, strict=True))
        return [by_index[index] for index in range(len(matrices))]

    def _exchange(self, pieces: Sequence[Tensor], sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """The elements that the ranks send to this one; `sent` and `received`: numbers of elements by rank."""
        flat = torch.cat([torch.empty(0, device=self._device, dtype=iteration_dtype(self._device)), *pieces])
        if len(sent) == 1:
            return flat
        result = flat.new_empty(sum(received))
        dist.all_to_all_single(result, flat, list(received), list(sent), group=self._group)
        return result


def iteration_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device computes in it, as torch and DeepSpeed do; float32 on the CPU and older GPUs."""
    return (
        torch.bfloat16 if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8 else torch.float32
    )


def orthogonalized(matrix: Tensor, steps: int) -> Tensor:
    """Newton-Schulz iteration on a matrix, or each of a stack, in its dtype: singular values near 1, same vectors."""
    a, b, c = _COEFFICIENTS
    stack = matrix.reshape(-1, *matrix.shape[-2:])
    is_tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if is_tall else stack
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_MIN_NORM)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).reshape(matrix.shape)


def _by_shape(matrices: Sequence[Tensor], steps: int) -> list[Tensor]:
    """The orthogonalized matrices, flat. Those of one shape are iterated together: alone, they would take fewer
    microseconds than the launches of their kernels."""
    results: dict[int, Tensor] = {}
    for shape in dict.fromkeys(matrix.shape for matrix in matrices):
        indices = [index for index, matrix in enumerate(matrices) if matrix.shape == shape]
        stack = orthogonalized(torch.stack([matrices[index] for index in indices]), steps)
        results |= dict(zip(indices, stack.flatten(1), strict=True))
    return [results[index] for index in range(len(matrices))]


def rounds(matrices: Sequence[Matrix], num_ranks: int) -> Iterator[list[Matrix]]:
    """Successive matrices with at most `MATRIX_ROUND` per rank, or one larger matrix."""
    taken: list[Matrix] = []
    for matrix in matrices:
        num_elements = sum(math.prod(each.shape) for each in (*taken, matrix))
        if taken and num_elements > MATRIX_ROUND * num_ranks:
            yield taken
            taken = []
        taken.append(matrix)
    if taken:
        yield taken


def assign(costs: Sequence[int], num_ranks: int) -> list[int]:
    """The owner of each matrix: the most expensive ones first, each to the rank with the least work so far."""
    owners, loads = [0] * len(costs), [0] * num_ranks
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners


def _size(matrix: Matrix, rank: int) -> int:
    start, stop = matrix.cuts[rank]
    return stop - start


def _piece(flat: Tensor, matrix: Matrix, rank: int) -> Tensor:
    """This rank's elements of the matrix in a flat tensor."""
    return flat.detach()[matrix.offset : matrix.offset + _size(matrix, rank)]
