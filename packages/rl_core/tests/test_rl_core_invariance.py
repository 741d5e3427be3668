"""Padding, permutation, micro batches and ranks leave every loss and its gradient unchanged (fp64 1e-12, fp32 1e-6).

The model is a toy policy with shared parameters: the log-prob of a token with feature row x is -softplus(x . theta).
The reference is the loss of the whole mini batch at once. Tolerances are relative to the sum of the absolute per-token
contributions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plinth_testing.strategies import lengths, seeds
from rl_core import (
    aggregate_loss,
    broadcast_to_tokens,
    cispo_loss,
    flatten_padded,
    gspo_loss,
    kl_loss,
    pad_flat,
    ppo_clip_loss,
    rollout_weights,
    token_weights,
    value_loss,
)

PROPERTY = settings(deadline=None, derandomize=True, max_examples=12)
NUM_FEATURES = 4
MODES = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "fixed_length")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A mini batch as flat rows; every field except `lens_S` and `weights_S` is per token."""

    features_KD: Tensor
    old_K: Tensor
    rollout_K: Tensor
    ref_K: Tensor
    advantages_K: Tensor
    returns_K: Tensor
    old_values_K: Tensor
    lens_S: Tensor
    weights_S: Tensor


TOKEN_FIELDS = [field.name for field in fields(Batch) if field.name not in ("lens_S", "weights_S")]


def policy(theta_D: Tensor, features_KD: Tensor) -> Tensor:
    return -torch.nn.functional.softplus((features_KD * theta_D).sum(-1))


LossFn = Callable[[Batch, Tensor, Tensor], Tensor]


def _ppo(**options: float) -> LossFn:
    return lambda b, lp, _: ppo_clip_loss(lp, b.old_K, b.advantages_K, **options)[0]


def _corrected(level: str, mode: str) -> LossFn:
    def loss(b: Batch, lp: Tensor, _: Tensor) -> Tensor:
        weights, _ = rollout_weights(
            b.old_K, b.rollout_K, mode=mode, level=level, max_ratio=1.5, min_ratio=0.5, response_lens_S=b.lens_S
        )
        return weights * ppo_clip_loss(lp, b.old_K, b.advantages_K)[0]

    return loss


def _kl(kind: str, old: bool = False) -> LossFn:
    return lambda b, lp, _: kl_loss(lp, b.ref_K, kind=kind, old_log_probs_K=b.old_K if old else None)


LOSSES: dict[str, LossFn] = {
    "ppo_clip": _ppo(),
    "clip_higher": _ppo(clip_low=0.2, clip_high=0.28),
    "dual_clip": _ppo(dual_clip=1.1),
    "gspo": lambda b, lp, _: gspo_loss(lp, b.old_K, b.advantages_K, b.lens_S, clip_low=0.05, clip_high=0.05)[0],
    "cispo": lambda b, lp, _: cispo_loss(lp, b.old_K, b.advantages_K, clip_high=0.2)[0],
    "tis_token": _corrected("token", "truncate"),
    "tis_sequence": _corrected("sequence", "truncate"),
    "tis_geometric": _corrected("geometric", "truncate"),
    "masked_is_token": _corrected("token", "mask"),
    "masked_is_sequence": _corrected("sequence", "mask"),
    "masked_is_geometric": _corrected("geometric", "mask"),
    "kl_k1": _kl("k1"),
    "kl_k2": _kl("k2"),
    "kl_k3": _kl("k3"),
    "kl_abs": _kl("abs"),
    "kl_k3_off_policy": _kl("k3", old=True),
    "value_clipped": lambda b, _, v: value_loss(v, b.returns_K, b.old_values_K, clip=0.2)[0],
    "value_plain": lambda b, _, v: value_loss(v, b.returns_K, clip=None)[0],
    "ppo_kl_entropy": lambda b, lp, _: (
        ppo_clip_loss(lp, b.old_K, b.advantages_K)[0] + 0.1 * kl_loss(lp, b.ref_K) + 0.01 * lp.exp() * lp
    ),
}


def loss_and_grad(batch: Batch, theta: Tensor, name: str) -> tuple[Tensor, Tensor]:
    leaf = theta.clone().requires_grad_()
    log_probs = policy(leaf, batch.features_KD)
    values = (batch.features_KD * leaf).sum(-1)
    loss = aggregate_loss(LOSSES[name](batch, log_probs, values), batch.weights_S, batch.lens_S)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), grad


def scale_of(batch: Batch, theta: Tensor, name: str) -> float:
    """Sum of absolute token contributions to loss and gradient, at least 1; rounding errors are relative to it."""
    log_probs = policy(theta, batch.features_KD)
    values = (batch.features_KD * theta).sum(-1)
    weights_K = broadcast_to_tokens(batch.weights_S, batch.lens_S)
    loss_K = LOSSES[name](batch, log_probs, values).abs()
    bound_K = loss_K + (1 + batch.advantages_K.abs() + batch.returns_K.abs()) * batch.features_KD.abs().sum(-1)
    return max(1.0, float((weights_K * bound_K).sum()))


def pick(batch: Batch, rows: Sequence[int]) -> Batch:
    """The batch of these sequences, in this order, with their weights in the whole mini batch."""
    starts = (batch.lens_S.cumsum(0) - batch.lens_S).tolist()
    lens = batch.lens_S.tolist()
    tokens = torch.tensor([starts[r] + t for r in rows for t in range(lens[r])], dtype=torch.int64)
    index = torch.tensor(list(rows), dtype=torch.int64)
    changed = {name: getattr(batch, name)[tokens] for name in TOKEN_FIELDS}
    return Batch(**changed, lens_S=batch.lens_S[index], weights_S=batch.weights_S[index])


def make_batch(lens: list[int], seed: int, dtype: torch.dtype, mode: str) -> tuple[Batch, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    num_tokens = sum(lens)
    lens_S = torch.tensor(lens)
    features, theta = randn(num_tokens, NUM_FEATURES, scale=0.7), randn(NUM_FEATURES)
    log_probs = policy(theta, features)
    batch = Batch(
        features_KD=features,
        old_K=log_probs + randn(num_tokens, scale=0.3),
        rollout_K=log_probs + randn(num_tokens, scale=0.4),
        ref_K=log_probs + randn(num_tokens, scale=0.3),
        advantages_K=broadcast_to_tokens(randn(len(lens)), lens_S),
        returns_K=randn(num_tokens),
        old_values_K=(features * theta).sum(-1) + randn(num_tokens, scale=0.3),
        lens_S=lens_S,
        weights_S=token_weights(mode, lens_S, fixed_length=20 if mode == "fixed_length" else None, dtype=dtype),
    )
    return batch, theta


def assert_same(batch: Batch, theta: Tensor, name: str, got: tuple[Tensor, Tensor]) -> None:
    want = loss_and_grad(batch, theta, name)
    limit = TOLERANCE[theta.dtype] * scale_of(batch, theta, name)
    assert got[0].dtype == want[0].dtype == theta.dtype
    for got_part, want_part in zip(got, want, strict=True):
        assert float((got_part - want_part).abs().max()) <= limit


def summed(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([loss for loss, _ in parts]).sum(), torch.stack([grad for _, grad in parts]).sum(0)


lens_strategy = lengths(longest=9, max_size=12).filter(lambda lens: sum(lens) > 0)
dtype_strategy = st.sampled_from([torch.float64, torch.float32])
batch_strategy = st.builds(make_batch, lens_strategy, seeds(), dtype_strategy, st.sampled_from(MODES))
every_loss = pytest.mark.parametrize("name", LOSSES)


@every_loss
@PROPERTY
@given(made=batch_strategy, data=st.data())
def test_padding(name: str, made: tuple[Batch, Tensor], data: st.DataObject) -> None:
    """[B, L] rows with garbage in left, right and inner padding, and empty padding sequences at the end."""
    batch, theta = made
    lens = batch.lens_S.tolist() + [0] * data.draw(st.integers(0, 3))
    width = max(lens) + data.draw(st.integers(0, 3))
    places = [sorted(data.draw(st.permutations(range(width)))[:length]) for length in lens]
    mask = torch.zeros(len(lens), width, dtype=torch.bool)
    for row, columns in enumerate(places):
        mask[row, columns] = True
    changed = {}
    for field in TOKEN_FIELDS:
        flat = getattr(batch, field)
        if flat.dim() == 1:
            changed[field], lens_S = flatten_padded(pad_flat(flat, mask, fill=1e30), mask)
        else:
            changed[field] = torch.stack(
                [flatten_padded(pad_flat(column, mask, fill=1e30), mask)[0] for column in flat.unbind(1)], dim=1
            )
    # weights are computed from the padded lengths: empty sequences must not count
    mode = data.draw(st.sampled_from(MODES))
    fixed = 20 if mode == "fixed_length" else None
    dtype = theta.dtype
    padded = Batch(
        **changed, lens_S=lens_S, weights_S=token_weights(mode, torch.tensor(lens), fixed_length=fixed, dtype=dtype)
    )
    plain = replace(batch, weights_S=token_weights(mode, batch.lens_S, fixed_length=fixed, dtype=dtype))
    assert_same(plain, theta, name, loss_and_grad(padded, theta, name))


@every_loss
@PROPERTY
@given(made=batch_strategy, num_parts=st.integers(1, 4), data=st.data())
def test_permutations_and_arbitrary_splits(
    name: str, made: tuple[Batch, Tensor], num_parts: int, data: st.DataObject
) -> None:
    """Sequences in any order, each in a random part; parts may be empty, and one part is a permutation."""
    batch, theta = made
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for row in data.draw(st.permutations(range(batch.lens_S.numel()))):
        parts[data.draw(st.integers(0, num_parts - 1))].append(row)
    assert_same(batch, theta, name, summed([loss_and_grad(pick(batch, rows), theta, name) for rows in parts]))


@PROPERTY
@given(lens=lens_strategy, mode=st.sampled_from(MODES))
def test_weights_from_a_part_equal_weights_of_the_whole(lens: list[int], mode: str) -> None:
    fixed = 20 if mode == "fixed_length" else None
    whole = token_weights(mode, torch.tensor(lens), fixed_length=fixed, dtype=torch.float64)
    totals = {"num_tokens": sum(lens), "num_sequences": sum(length > 0 for length in lens)}
    parts = [
        token_weights(mode, torch.tensor([length]), fixed_length=fixed, dtype=torch.float64, **totals)
        for length in lens
    ]
    assert torch.equal(torch.cat(parts), whole)


@PROPERTY
@given(lens=lens_strategy)
def test_weights_sum_to_one_where_the_loss_is_a_mean(lens: list[int]) -> None:
    lens_S = torch.tensor(lens)
    for mode in ("token_mean", "seq_mean_token_mean"):
        weights = token_weights(mode, lens_S, dtype=torch.float64)
        assert abs(float((weights * lens_S).sum()) - 1.0) <= 1e-12


def test_aggregation_against_hand_values() -> None:
    loss_K = torch.tensor([1.0, 2.0, 3.0, 10.0], dtype=torch.float64)
    lens = torch.tensor([3, 0, 1])
    want = {"token_mean": 4.0, "seq_mean_token_sum": 8.0, "seq_mean_token_mean": 6.0, "fixed_length": 16.0 / 10.0}
    for mode, value in want.items():
        weights = token_weights(mode, lens, fixed_length=5 if mode == "fixed_length" else None, dtype=torch.float64)
        assert float(aggregate_loss(loss_K, weights, lens)) == pytest.approx(value, abs=1e-15)
