"""Losses and advantages by name: every entry loads, has the settings of its function, and does what all of them do.

A new entry is tested here without a line of its own; its equation is tested beside the others.
"""

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plinth_testing.strategies import seeds
from rl_core import ADVANTAGES, POLICY_LOSSES, Batch, pack, token_weights

PROPERTY = settings(deadline=None, derandomize=True, max_examples=20)
response_lens = st.lists(st.integers(1, 6), min_size=2, max_size=6)


def batch_of(lens: list[int], seed: int) -> Batch:
    random = torch.Generator().manual_seed(seed)
    columns = {name: torch.randn(sum(lens), generator=random) for name in ("log_probs", "old_log_probs", "advantages")}
    weights_K = token_weights("token_mean", torch.tensor(lens)).repeat_interleave(torch.tensor(lens))
    return pack([[0]] * len(lens), [[1] * length for length in lens], columns=columns | {"weights": weights_K})


def share(name: str, batch: Batch) -> tuple[float, torch.Tensor]:
    """The batch's share of the loss, and its gradient."""
    log_probs_K = batch.columns["log_probs"].clone().requires_grad_()
    loss_K, stats = POLICY_LOSSES[name](log_probs_K, batch)
    assert loss_K.shape == stats.ratio_K.shape == stats.clipped_K.shape == log_probs_K.shape
    loss = (batch.columns["weights"] * loss_K).sum()
    loss.backward()
    assert log_probs_K.grad is not None
    return float(loss.detach()), log_probs_K.grad


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_settings_of_a_loss_are_those_of_its_function(name: str) -> None:
    entry = POLICY_LOSSES[name]
    parameters = inspect.signature(entry.load()).parameters
    defaults = {key: one.default for key, one in parameters.items() if one.default is not one.empty}
    assert dict(entry.options) == defaults
    assert entry.needs_lengths == ("response_lens_S" in parameters)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@PROPERTY
@given(lens=response_lens, seed=seeds(), data=st.data())
def test_shares_of_micro_batches_add_up_to_the_loss_and_its_gradient(
    name: str, lens: list[int], seed: int, data: st.DataObject
) -> None:
    batch = batch_of(lens, seed)
    order = data.draw(st.permutations(range(len(lens))))
    cut = data.draw(st.integers(1, len(lens) - 1))
    whole, gradient_K = share(name, batch)
    parts = [share(name, batch.select(part)) for part in (order[:cut], order[cut:])]
    assert sum(loss for loss, _ in parts) == pytest.approx(whole, rel=1e-4, abs=1e-5)
    assert torch.allclose(torch.cat([grad for _, grad in parts]), gradient_K[batch.target_places(order)], atol=1e-6)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@PROPERTY
@given(lens=response_lens, seed=seeds())
def test_before_the_first_update_the_gradient_is_that_of_reinforce(name: str, lens: list[int], seed: int) -> None:
    batch = batch_of(lens, seed)
    batch.columns["old_log_probs"] = batch.columns["log_probs"]
    _, gradient_K = share(name, batch)
    reinforce_K = -batch.columns["weights"] * batch.columns["advantages"]
    assert torch.allclose(gradient_K, reinforce_K, atol=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
@PROPERTY
@given(groups=st.lists(st.lists(st.integers(1, 6), min_size=2, max_size=4), min_size=1, max_size=4), seed=seeds())
def test_every_advantage_is_finite_and_ignores_a_shift_of_its_baseline(
    name: str, groups: list[list[int]], seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    entry = ADVANTAGES[name]
    lens_N = torch.tensor([length for group in groups for length in group])
    num_samples, num_tokens = len(lens_N), int(lens_N.sum())
    inputs = {
        "scores_N": torch.randn(num_samples, generator=random, dtype=torch.float64),
        "group_ids_N": torch.tensor([number for number, group in enumerate(groups) for _ in group]),
        "response_lens_N": lens_N,
        "response_lens_S": lens_N,
        "rewards_K": torch.randn(num_tokens, generator=random),
        "values_K": torch.randn(num_tokens, generator=random),
        "turn_rewards_U": torch.randn(num_samples, generator=random),
        "turn_counts_N": torch.ones(num_samples, dtype=torch.int64),
        "state_ids_U": torch.zeros(num_samples, dtype=torch.int64),
        "gamma": 1.0,
        "lam": 0.9,
    }
    if entry.extra_rollout is not None:
        inputs["baseline_scores_N"] = torch.randn(num_samples, generator=random, dtype=torch.float64)
    estimate = entry.estimate(inputs)
    if entry.needs_critic:
        estimate, returns_K = estimate
        assert returns_K.shape == (num_tokens,)
    assert estimate.shape == ((num_tokens,) if entry.per_token else (num_samples,))
    assert all(math.isfinite(value) for value in estimate.tolist())
    if entry.compares_group:
        shifts = {name: inputs[name] + 5.0 for name in ("scores_N", "turn_rewards_U")}
        shifted = entry.estimate(inputs | shifts)
        assert torch.allclose(shifted, estimate, atol=1e-5)
