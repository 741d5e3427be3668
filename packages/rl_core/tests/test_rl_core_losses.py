"""Policy and value losses, importance weights and KL, against plain loops and exact expectations."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plinth_testing.strategies import seeds
from rl_core import (
    aggregate_loss,
    broadcast_to_tokens,
    cispo_loss,
    gspo_loss,
    kl_estimate,
    kl_loss,
    policy_metric_shares,
    ppo_clip_loss,
    rollout_weights,
    segment_mean,
    segment_sum,
    token_weights,
    value_loss,
)

PROPERTY = settings(deadline=None, derandomize=True, max_examples=50)
KINDS = ("k1", "k2", "k3", "abs")


def rows(seed: int, count: int, num: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(scale * torch.randn(num, count, generator=generator, dtype=torch.float64))


def grad_of(loss_K: Tensor, leaf: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss_K.sum(), leaf)
    return grad


# PPO


@PROPERTY
@given(seeds(), st.integers(1, 30), st.floats(0, 1), st.floats(0, 2), st.one_of(st.none(), st.floats(1.01, 5)))
def test_ppo_against_a_loop(seed: int, count: int, low: float, high: float, dual: float | None) -> None:
    log_probs, old, advantages = rows(seed, count, 3)
    leaf = log_probs.requires_grad_()
    loss, stats = ppo_clip_loss(leaf, old, advantages, clip_low=low, clip_high=high, dual_clip=dual)
    grad, loss = grad_of(loss, leaf), loss.detach()
    for t in range(count):
        ratio, advantage = math.exp(leaf[t].item() - float(old[t])), float(advantages[t])
        objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        active = objective == ratio * advantage
        if dual is not None and advantage < 0 and dual * advantage > objective:
            objective, active = dual * advantage, False
            assert bool(stats.dual_clipped_K[t])
        assert float(loss[t]) == pytest.approx(-objective, rel=1e-12, abs=1e-12)
        assert float(grad[t]) == pytest.approx(-ratio * advantage if active else 0.0, rel=1e-12, abs=1e-12)
        assert bool(stats.clipped_K[t] | stats.dual_clipped_K[t]) == (not active)


@PROPERTY
@given(seeds(), st.integers(1, 20))
def test_losses_take_any_shape_and_lower_precision(seed: int, count: int) -> None:
    log_probs, old, advantages = rows(seed, 6 * count, 3)
    for loss_fn in (ppo_clip_loss, cispo_loss):
        flat = loss_fn(log_probs, old, advantages)[0]
        shaped = loss_fn(*(x.reshape(2, count, 3) for x in (log_probs, old, advantages)))[0]
        assert torch.equal(shaped.flatten(), flat)
        half = loss_fn(*(x.bfloat16() for x in (log_probs, old, advantages)))[0]
        assert half.dtype == torch.float32
        exact = loss_fn(*(x.bfloat16().double() for x in (log_probs, old, advantages)))[0]
        torch.testing.assert_close(half.double(), exact, rtol=1e-5, atol=1e-5)


@PROPERTY
@given(st.floats(50, 1e6), st.booleans(), st.booleans())
def test_far_ratios_stay_finite(distance: float, up: bool, good: bool) -> None:
    leaf = torch.tensor([distance if up else -distance], requires_grad=True)
    old, advantage = torch.zeros(1), torch.tensor([1.0 if good else -1.0])
    lens = torch.tensor([1])
    for loss, _ in (
        ppo_clip_loss(leaf, old, advantage),
        gspo_loss(leaf, old, advantage, lens),
        cispo_loss(leaf, old, advantage),
        (kl_loss(leaf, old), None),
    ):
        assert bool(loss.isfinite().all())
        assert bool(grad_of(loss, leaf).isfinite().all())


# GSPO


@PROPERTY
@given(seeds(), st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_gspo_equals_the_sequence_objective_and_its_gradient(seed: int, lens: list[int]) -> None:
    lens_S = torch.tensor(lens)
    count = sum(lens)
    log_probs, old = rows(seed, count, 2, scale=0.3)
    (per_sequence,) = rows(seed + 1, len(lens), 1)
    leaf = log_probs.requires_grad_()
    weights = token_weights("seq_mean_token_mean", lens_S, dtype=torch.float64)
    bounds = {"clip_low": 0.1, "clip_high": 0.15}
    token_form, stats = gspo_loss(leaf, old, broadcast_to_tokens(per_sequence, lens_S), lens_S, **bounds)
    got = aggregate_loss(token_form, weights, lens_S)
    ratio_S = segment_mean(leaf - old, lens_S).exp()
    objective_S = torch.minimum(ratio_S * per_sequence, ratio_S.clamp(0.9, 1.15) * per_sequence)
    want = -(objective_S * (lens_S > 0)).sum() / max(1, sum(length > 0 for length in lens))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad_of(got, leaf), grad_of(want, leaf), rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(stats.ratio_K, broadcast_to_tokens(ratio_S.detach(), lens_S))


# CISPO


@PROPERTY
@given(seeds(), st.integers(1, 30), st.floats(0, 1), st.floats(0, 5))
def test_cispo_keeps_every_gradient_with_a_clipped_weight(seed: int, count: int, low: float, high: float) -> None:
    log_probs, old, advantages = rows(seed, count, 3)
    leaf = log_probs.requires_grad_()
    loss, stats = cispo_loss(leaf, old, advantages, clip_low=low, clip_high=high)
    weight = (leaf.detach() - old).exp().clamp(1 - low, 1 + high)
    torch.testing.assert_close(grad_of(loss, leaf), -weight * advantages, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss.detach(), -weight * advantages * leaf.detach(), rtol=1e-12, atol=1e-12)
    assert torch.equal(stats.clipped_K, weight != stats.ratio_K)


# importance weights between rollout and trainer

levels = st.sampled_from(["token", "sequence", "geometric"])


@PROPERTY
@given(seeds(), st.lists(st.integers(0, 5), min_size=1, max_size=6), levels, st.floats(0, 1), st.floats(1, 3))
def test_rollout_weights_against_a_loop(seed: int, lens: list[int], level: str, low: float, high: float) -> None:
    lens_S = torch.tensor(lens)
    old, rollout = rows(seed, sum(lens), 2, scale=0.5)
    options = {"level": level, "max_ratio": high, "min_ratio": low, "response_lens_S": lens_S}
    truncated, inside = rollout_weights(old, rollout, mode="truncate", **options)
    masked, inside_again = rollout_weights(old, rollout, mode="mask", **options)
    assert torch.equal(inside, inside_again)
    place = 0
    for length in lens:
        gaps = [float(old[t]) - float(rollout[t]) for t in range(place, place + length)]
        for offset in range(length):
            log_ratio = {
                "token": gaps[offset],
                "sequence": sum(gaps),
                "geometric": sum(gaps) / length,
            }[level]
            ratio = math.exp(log_ratio)
            assert float(truncated[place + offset]) == pytest.approx(min(max(ratio, low), high), rel=1e-12)
            kept = low <= ratio <= high
            assert bool(inside[place + offset]) == kept
            assert float(masked[place + offset]) == pytest.approx(ratio if kept else 0.0, rel=1e-12)
        place += length


@PROPERTY
@given(seeds(), st.integers(1, 20), levels, st.sampled_from(["truncate", "mask"]))
def test_without_mismatch_weights_are_one_and_have_no_gradient(seed: int, count: int, level: str, mode: str) -> None:
    (old,) = rows(seed, count, 1)
    leaf = old.requires_grad_()
    weights, inside = rollout_weights(leaf, leaf, mode=mode, level=level, response_lens_S=torch.tensor([count]))
    assert torch.equal(weights, torch.ones_like(weights))
    assert bool(inside.all())
    assert not weights.requires_grad


# KL


@pytest.mark.parametrize("kind", KINDS)
@PROPERTY
@given(seed=seeds(), vocabulary=st.integers(2, 9), off_policy=st.booleans())
def test_kl_loss_has_the_gradient_of_what_it_estimates(kind: str, seed: int, vocabulary: int, off_policy: bool) -> None:
    """The exact expectation over every token of the vocabulary, on policy and from an older policy."""
    logits, ref_logits, old_logits = rows(seed, vocabulary, 3)
    leaf = logits.requires_grad_()
    log_probs, ref = leaf.log_softmax(0), ref_logits.log_softmax(0)
    old = old_logits.log_softmax(0)
    sampled_from = old.exp() if off_policy else log_probs.detach().exp()
    per_token = kl_loss(log_probs, ref, kind=kind, old_log_probs_K=old if off_policy else None)
    got = grad_of(sampled_from * per_token, leaf)
    policy = leaf.log_softmax(0)
    # k1, k2 and k3 estimate KL(policy || ref); abs the mean absolute difference
    target = (policy.exp() * ((policy - ref).abs() if kind == "abs" else (policy - ref))).sum()
    torch.testing.assert_close(got, grad_of(target, leaf), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k3"])
@PROPERTY
@given(seed=seeds(), vocabulary=st.integers(2, 9))
def test_kl_estimates_are_unbiased(kind: str, seed: int, vocabulary: int) -> None:
    policy, ref = (row.log_softmax(0) for row in rows(seed, vocabulary, 2))
    exact = (policy.exp() * (policy - ref)).sum()
    torch.testing.assert_close((policy.exp() * kl_estimate(policy, ref, kind)).sum(), exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@PROPERTY
@given(seed=seeds(), count=st.integers(1, 30))
def test_kl_loss_value_is_the_estimate(kind: str, seed: int, count: int) -> None:
    log_probs, ref = rows(seed, count, 2)
    estimate = kl_estimate(log_probs, ref, kind)
    assert torch.equal(kl_loss(log_probs, ref, kind=kind), estimate)
    assert torch.equal(kl_loss(log_probs, ref, kind=kind, old_log_probs_K=log_probs), estimate)
    if kind != "k1":
        assert bool((estimate >= 0).all())
    assert torch.equal(kl_estimate(ref, ref, kind), torch.zeros(count, dtype=torch.float64))


@PROPERTY
@given(st.floats(-1e-3, 1e-3))
def test_small_k3_keeps_its_precision_in_fp32(difference: float) -> None:
    exact = float(kl_estimate(torch.tensor(difference, dtype=torch.float64), torch.tensor(0.0)))
    single = float(kl_estimate(torch.tensor(difference, dtype=torch.float32), torch.tensor(0.0)))
    assert single == pytest.approx(exact, abs=1e-10)


# value loss, entropy, segments


@PROPERTY
@given(seeds(), st.integers(1, 30), st.none() | st.floats(0.01, 2))
def test_value_loss_against_a_loop(seed: int, count: int, clip: float | None) -> None:
    values, returns, old = rows(seed, count, 3)
    leaf = values.requires_grad_()
    loss, clipped = value_loss(leaf, returns, old, clip=clip)
    grad, loss = grad_of(loss, leaf), loss.detach()
    for t in range(count):
        v, r, o = leaf[t].item(), float(returns[t]), float(old[t])
        held = v if clip is None or abs(v - o) <= clip else o + math.copysign(clip, v - o)
        plain, bounded = 0.5 * (v - r) ** 2, 0.5 * (held - r) ** 2
        assert float(loss[t]) == pytest.approx(max(plain, bounded), rel=1e-12, abs=1e-15)
        assert bool(clipped[t]) == (bounded > plain)
        assert float(grad[t]) == pytest.approx(0.0 if bounded > plain else v - r, rel=1e-11, abs=1e-12)
    assert torch.equal(value_loss(leaf, returns)[0], value_loss(leaf, returns, old, clip=None)[0])


@PROPERTY
@given(seeds(), st.lists(st.integers(0, 6), max_size=8))
def test_segments_against_a_loop(seed: int, lens: list[int]) -> None:
    (values,) = rows(seed, sum(lens), 1)
    leaf = values.requires_grad_()
    lens_S = torch.tensor(lens, dtype=torch.int64)
    want = [part.sum().item() for part in leaf.detach().split(lens)] if lens else []
    sums, means = segment_sum(leaf, lens_S), segment_mean(leaf, lens_S)
    assert sums.tolist() == pytest.approx(want, abs=1e-12)
    assert means.tolist() == pytest.approx([s / max(n, 1) for s, n in zip(want, lens, strict=True)], abs=1e-12)
    # an empty row has a graph too
    assert torch.equal(grad_of(sums, leaf), torch.ones(sum(lens), dtype=torch.float64))
    assert grad_of(means, leaf).tolist() == pytest.approx([1 / n for n in lens for _ in range(n)])


@PROPERTY
@given(seeds(), st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_metric_shares_add_up(seed: int, lens: list[int]) -> None:
    lens_S = torch.tensor(lens)
    log_probs, old, advantages = rows(seed, sum(lens), 3, scale=0.3)
    weights_K = broadcast_to_tokens(token_weights("token_mean", lens_S, dtype=torch.float64), lens_S)
    whole = policy_metric_shares(ppo_clip_loss(log_probs, old, advantages)[1], weights_K)
    pieces = [x.split(lens) for x in (log_probs, old, advantages, weights_K)]
    shares = [policy_metric_shares(ppo_clip_loss(lp, o, a)[1], w) for lp, o, a, w in zip(*pieces, strict=True)]
    for name, value in whole.items():
        assert float(sum(share[name] for share in shares)) == pytest.approx(float(value), abs=1e-12)
    assert float(whole["kl_old"]) >= 0.0
    assert 0.0 <= float(whole["clip_fraction"]) <= 1.0 + 1e-12
