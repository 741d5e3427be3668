"""Matrix product, norm, attention, experts and log-probs whose rows do not depend on the rows beside them.

A server computes one token of a request at a time, beside those of other requests; a trainer computes all tokens of a
sequence at once. Usual kernels choose their order of summation by the number of rows, so the two round differently.
Each operation here computes a row in one order, whatever rows are beside it: `servers/exact/install.py` puts them into
vLLM's layers, and ds_engine into those of transformers (`EngineConfig.match_servers`). They have no gradients.

On a CPU, rows are padded to whole blocks, and attention reads keys in blocks that begin at position 0. Functions such
as exp are computed in whole vectors, since torch computes what is left over in another way. On a GPU, Triton kernels
with one tile shape do the same (`kernels.py`). Source of the idea: He et al., "Defeating nondeterminism in LLM
inference", 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS = 16
"""Rows of a block on a CPU. The products of MKL take other paths below four rows."""
_KEYS = 64
"""Keys of a block on a CPU."""
_VECTOR, _SERIAL = 64, 16384
"""Elements that torch's loops on CPUs take at once at most, and that they do not divide among threads."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias; x: [..., K], weight: [N, K], bias: [N]."""
    rows = x.reshape(-1, x.shape[-1])
    if x.is_cuda:
        from .kernels import linear as kernel

        out = kernel(rows, weight, bias)
    else:
        out = F.linear(F.pad(rows, (0, 0, 0, -len(rows) % _ROWS)), weight, bias)[: len(rows)]
    return out.view(*x.shape[:-1], len(weight))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) in fp32, rounded to the dtype of `x`, times `weight`: as in transformers."""
    if x.is_cuda:
        from .kernels import rms_norm as kernel

        return kernel(x, weight, eps)[0]
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(`rms_norm` of x + residual, the sum)."""
    if x.is_cuda:
        from .kernels import rms_norm as kernel

        return kernel(x, weight, eps, residual)
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate * sigmoid(gate), rounded, times `up`; both [..., I]."""
    if gate.is_cuda:
        from .kernels import silu_and_mul as kernel

        return kernel(gate, up)
    return _in_vectors(F.silu, gate) * up


def route(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """(weights in the dtype of `logits`, experts) of each token, [T, K], the first of equal experts first; logits:
    [T, E]. Made of torch's operations, so it has gradients."""
    probs = logits.float().softmax(dim=-1)
    index = probs.detach().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = probs.gather(-1, index)
    if normalize:
        weights = weights / _in_order(weights.unbind(1))[:, None]
    return weights.to(logits.dtype), index


def _in_order(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`linear` of rows that are sorted by expert; x: [S, K], weight: [E, N, K], ends: [E] int32, the end of each
    expert's rows."""
    if x.is_cuda:
        from .kernels import grouped_linear as kernel

        return kernel(x, weight, ends)
    out, begin = x.new_empty((len(x), weight.shape[1])), 0
    for matrix, end in zip(weight, ends.tolist(), strict=True):
        if end > begin:
            out[begin:end] = linear(x[begin:end], matrix)
        begin = end
    return out


def collect(rows: Tensor, place: Tensor) -> Tensor:
    """Sums of each token's K rows in their order, in fp32; rows: [S, N], place: [T, K]."""
    if rows.is_cuda:
        from .kernels import collect as kernel

        return kernel(rows, place)
    return _in_order([rows[number].float() for number in place.unbind(1)]).to(rows.dtype)


def experts(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """The experts of a mixture as in ds_engine's grouped products.

    Args:
        x: [T, H].
        up: [E, 2 I, H], each expert's gate before its up projection.
        down: [E, H, I].
        weights: [T, K], see `route`.
        index: [T, K], see `route`.
    """
    expert, slot = index.flatten().sort()
    ends = torch.searchsorted(expert, torch.arange(len(up), device=x.device), right=True, out_int32=True)
    place = torch.empty_like(slot).scatter_(0, slot, torch.arange(len(slot), device=x.device)).view_as(index)
    gate, other = grouped_linear(x[slot // index.shape[1]], up, ends).chunk(2, dim=-1)
    scaled = silu_and_mul(gate, other) * weights.flatten()[slot, None]
    return collect(grouped_linear(scaled, down, ends), place)


def _in_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function whose result for an element does not depend on its place in `x`."""
    flat = x.reshape(-1)
    parts = F.pad(flat, (0, -len(flat) % _VECTOR)).split(_SERIAL)
    return torch.cat([function(part) for part in parts])[: len(flat)].view(x.shape)


def rotary_table(frequencies: Tensor, num_positions: int, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of rotary positions as in transformers, [positions, 2, 2 F]; frequencies: [F] fp32."""
    angles = torch.arange(num_positions, device=frequencies.device)[:, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    if angles.is_cuda:
        return torch.stack((angles.cos(), angles.sin()), dim=1).to(dtype)
    return torch.stack((_in_vectors(torch.cos, angles), _in_vectors(torch.sin, angles)), dim=1).to(dtype)


def rotate(x: Tensor, table: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
    """Rotary positions as in transformers.

    Args:
        x: [T, heads, d].
        table: `rotary_table` in the dtype of `x`.
        positions: [T] int64.
        inverse: turn back, which is the gradient.
    """
    if x.is_cuda:
        from .kernels import rotate as kernel

        return kernel(x, table, positions, inverse)
    cos, sin = table[positions][:, :, None].unbind(1)
    first, second = x.chunk(2, dim=-1)
    sin = -sin if inverse else sin
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, query_start: Tensor, lengths: Tensor, scale: float, longest_q: int,
    out: Tensor | None = None, lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of the last tokens of S sequences to all tokens of each.

    Args:
        q: [T, heads, d], the queries of all sequences, one sequence after the other.
        k: [blocks, key heads, B, d], tokens in blocks of B; heads is a multiple of key heads.
        v: like `k`.
        table: [S, most blocks] int32, the blocks of each sequence in order.
        query_start: [S + 1] int32, the first query of each sequence, and their number.
        lengths: [S] int32, tokens of each sequence.
        longest_q: the largest number of queries of a sequence.
        out: takes the result.
        lse: takes fp32 log-sum-exps of the scores, [heads, T]; on a GPU only.

    Returns:
        [T, heads, d]; rows after the last query are undefined.
    """
    if q.is_cuda:
        from .kernels import attention as kernel

        return kernel(q, k, v, table, query_start, lengths, scale, longest_q, out, lse)
    out, block = torch.empty_like(q) if out is None else out, k.shape[2]
    starts = query_start.tolist()
    for row, length in enumerate(lengths.tolist()):
        if (begin := starts[row]) == (end := starts[row + 1]):
            continue
        blocks = table[row, : -(-length // block)].long()
        keys, values = (x[blocks].transpose(0, 1).flatten(1, 2)[:, :length] for x in (k, v))
        out[begin:end] = _attend(q[begin:end], keys, values, scale)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of one sequence in fp32; q: [n, heads, d], k and v: [key heads, length, d].

    A query at position p stands in row p % _ROWS of its block of queries, and a product has one shape, so a query meets
    the same numbers in the same order whether it comes alone or with the whole sequence.
    """
    (num, heads, width), (key_heads, length, _) = q.shape, k.shape
    first = length - num
    skipped = first % _ROWS
    before = first // _ROWS  # whole blocks of queries before these
    tiles = -(-(skipped + num) // _ROWS)
    q = F.pad(q.float(), (0, 0, 0, 0, skipped, tiles * _ROWS - skipped - num))
    q = q.view(tiles, _ROWS, key_heads, -1, width).permute(2, 0, 3, 1, 4)  # [key heads, tiles, group, rows, d]
    group = q.shape[2]
    k, v = (F.pad(x.float(), (0, 0, 0, -length % _KEYS)) for x in (k, v))
    position = (before * _ROWS + torch.arange(tiles * _ROWS)).view(1, tiles, 1, _ROWS, 1)
    top = q.new_full((key_heads, tiles, group, _ROWS, 1), -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for start in range(0, length, _KEYS):
        seen = max(0, start // _ROWS - before)  # tiles before it see none of these keys
        part, shape = slice(seen, tiles), (-1, _ROWS, width)
        keys, values = (x[:, start : start + _KEYS] for x in (k, v))
        num_tiles = tiles - seen
        keys = keys[:, None].expand(-1, num_tiles * group, -1, -1).reshape(-1, _KEYS, width)
        values = values[:, None].expand(-1, num_tiles * group, -1, -1).reshape(-1, _KEYS, width)
        scores = torch.bmm(q[:, part].reshape(shape), keys.transpose(1, 2)).view(key_heads, num_tiles, group, _ROWS, -1)
        scores = scores.mul_(scale).masked_fill_(start + torch.arange(_KEYS) > position[:, part], -torch.inf)
        new_top = torch.maximum(top[:, part], scores.amax(-1, keepdim=True))
        weights, fade = (_in_vectors(torch.exp, x - new_top) for x in (scores, top[:, part]))
        total[:, part] = total[:, part] * fade + weights.sum(-1, keepdim=True)
        added = torch.bmm(weights.view(-1, _ROWS, _KEYS), values).view(key_heads, num_tiles, group, _ROWS, width)
        out[:, part] = out[:, part] * fade + added
        top[:, part] = new_top
    out = (out / total).permute(1, 3, 0, 2, 4).reshape(tiles * _ROWS, heads, width)
    return out[skipped : skipped + num]


def log_probs(logits: Tensor) -> Tensor:
    """fp32 log-probs of rows of logits, [N, V]."""
    if logits.is_cuda:
        from .kernels import log_sum_exp

        return logits - log_sum_exp(logits)[0][:, None]
    return logits.float().log_softmax(dim=-1)


def scores(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(`token_log_probs`, entropies), fp32 [N]; logits: [N, V]."""
    if logits.is_cuda:
        from .kernels import log_sum_exp

        log_sums, entropies = log_sum_exp(logits, entropies=True)
        return logits.gather(-1, tokens[:, None])[:, 0].float() - log_sums, entropies
    rows = log_probs(logits)
    return rows.gather(-1, tokens[:, None])[:, 0], -(rows.exp() * rows).sum(-1)


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """`log_probs` of one token a row, [N]; tokens: [N] int64."""
    if logits.is_cuda:
        from .kernels import log_sum_exp

        return logits.gather(-1, tokens[:, None])[:, 0] - log_sum_exp(logits)[0]
    return log_probs(logits).gather(-1, tokens[:, None])[:, 0]
