"""The off-policy correction: what it refuses, its columns and metrics, and that it repairs stale rollouts."""

import copy
import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rl_runtime_samples import sample
from torch import Tensor

from ds_engine import TokenOutputs
from plinth_testing import raises, random_model, tiny_config
from rl_core import broadcast_to_tokens, mismatch_metrics
from rl_runtime import InputError
from rl_runtime.job_config import JobConfig
from rl_runtime.rollout.config import OversamplingConfig
from rl_runtime.samples import batch_of
from rl_runtime.training.metrics import mismatch
from rl_runtime.training.off_policy import RolloutCorrection, compare_with_rollout, correction_weights
from rl_runtime.training.policy import PolicyConfig
from rl_runtime.training.policy_loss import loss_weights, policy_loss
from rollout_vllm import RolloutConfig, Sample


def sampled(rollout_log_probs: Any, *, spans: Any = ()) -> Sample:
    log_probs = np.asarray(rollout_log_probs, np.float32)
    return sample(len(log_probs), log_probs=log_probs, spans=spans)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"mode": "truncate", "max_ratio": 0.9}, "max_ratio"),
        ({"mode": "truncate", "max_ratio": math.inf}, "max_ratio"),
        ({"mode": "truncate", "max_ratio": math.nan}, "max_ratio"),
        ({"mode": "mask", "min_ratio": 1.1}, "min_ratio"),
        ({"mode": "mask", "min_ratio": -0.1}, "min_ratio"),
        ({"mode": "truncate", "min_ratio": 1.0, "max_ratio": 1.0}, "min_ratio"),
        ({"level": "sequence"}, "mode"),
        ({"max_ratio": 3.0}, "mode"),
    ],
)
def test_bounds_without_a_meaning_are_refused(settings: dict[str, Any], field: str) -> None:
    with raises(InputError, field=field):
        RolloutCorrection(**settings)


log_probs = st.lists(st.lists(st.floats(-4, 0, width=32), min_size=1, max_size=5), min_size=1, max_size=6)


@given(rollout=log_probs, shift=st.floats(-2, 2), level=st.sampled_from(["token", "sequence", "geometric"]))
def test_weights_belong_to_their_samples(rollout: list[list[float]], shift: float, level: Any) -> None:
    """Sample i differs by shift * i at every token, so that each has a ratio of its own."""
    batch = batch_of(list(map(sampled, rollout)))
    old_K = torch.cat([torch.tensor(values) + shift * i for i, values in enumerate(rollout)])
    correction = RolloutCorrection(mode="mask", level=level, max_ratio=4.0, min_ratio=0.25)
    batch.add_columns(old_log_probs=old_K)
    metrics = compare_with_rollout(batch, correction)
    assert batch.columns["rollout_log_probs"].tolist() == [value for values in rollout for value in values]
    exponents = [shift * i * (len(values) if level == "sequence" else 1) for i, values in enumerate(rollout)]
    if any(abs(abs(exponent) - math.log(4)) < 1e-3 for exponent in exponents):
        return  # rounding decides
    weights = [math.exp(e) if abs(e) < math.log(4) else 0.0 for e in exponents]
    expected = np.repeat(weights, [len(values) for values in rollout])
    assert correction_weights(batch, correction).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert metrics["rollout/correction_weight_mean"] == pytest.approx(expected.mean(), rel=1e-4, abs=1e-6)
    assert metrics["rollout/correction_outside_share"] == pytest.approx(np.mean(expected == 0))
    if expected.any():
        ess = expected.sum() ** 2 / (len(expected) * (expected**2).sum())
        assert metrics["rollout/correction_ess"] == pytest.approx(ess, rel=1e-3)


def test_without_a_correction_there_are_no_weights() -> None:
    batch = batch_of([sampled([-1.0, -2.0])])
    batch.add_columns(old_log_probs=torch.zeros(2))
    assert compare_with_rollout(batch, RolloutCorrection()) == mismatch(batch)
    assert correction_weights(batch, RolloutCorrection()) == 1


def test_mismatch_metrics_are_those_of_rl_core_for_fresh_and_for_stale_tokens() -> None:
    """The first sample was begun by version 2 and finished by 3, the second is whole, the third stale throughout."""
    rollout = [[-1.0, -2.0, -0.5], [-1.5, -0.25], [-3.0]]
    spans = [((2, 1), (3, 2)), ((3, 2),), ((1, 1),)]
    batch = batch_of([sampled(row, spans=span) for row, span in zip(rollout, spans, strict=True)])
    assert batch.columns["staleness"].tolist() == [1, 0, 0, 0, 0, 2]
    batch.add_columns(old_log_probs=torch.tensor([-1.75, -2.25, -0.25, -1.5, -1.25, -2.5]))
    metrics = mismatch(batch)
    fresh = mismatch_metrics(
        torch.tensor([-2.25, -0.25, -1.5, -1.25]),
        torch.tensor([-2.0, -0.5, -1.5, -0.25]),
        response_lens_S=torch.tensor([2, 2]),
    )
    stale = mismatch_metrics(
        torch.tensor([-1.75, -2.5]), torch.tensor([-1.0, -3.0]), response_lens_S=torch.tensor([1, 1])
    )
    assert metrics["rollout/stale_token_share"] == 2 / 6
    established = {"abs_mean": "log_prob_mismatch", "abs_max": "log_prob_mismatch_max", "kl_k3": "mismatch_kl"}
    for values, suffix in ((fresh, ""), (stale, "_stale")):
        for name, value in values.items():
            if name != "num_tokens":
                assert metrics[f"rollout/{established.get(name, f'mismatch_{name}')}{suffix}"] == value, name
    assert len(metrics) == 1 + 2 * (len(fresh) - 1)
    assert {"rollout/mismatch_ratio_p99", "rollout/mismatch_seq_ess", "rollout/mismatch_ess"} < set(metrics)


LENGTH, VOCABULARY = 3, 8
RESPONSES = tuple(itertools.product(range(VOCABULARY), repeat=LENGTH))
SCORES_Y = torch.tensor([sum(token % 2 for token in response) / LENGTH for response in RESPONSES])
PLAIN = PolicyConfig(loss_aggregation="seq_mean_token_sum", kl_coef=0.05, kl_kind="k2", entropy_coef=0.05)


def outputs_of(model: Any) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of every response to the prompt (1,), [Y, LENGTH] each."""
    ids = torch.tensor([(1, *response) for response in RESPONSES])
    logits = model(ids).logits[:, :-1].double().log_softmax(-1)
    entropy = -(logits.exp() * logits).sum(-1)
    return logits.gather(-1, ids[:, 1:, None])[..., 0], entropy


def expected_gradient(model: Any, sampler_Y: Tensor, correction: RolloutCorrection) -> Tensor:
    """Gradient of the loss over all responses, each as often as a policy with log-probs `sampler_Y` samples it."""
    log_probs, entropy = outputs_of(model)
    config = replace(PLAIN, rollout_correction=correction)
    batch = batch_of(list(map(sampled, sampler_Y.numpy())))
    lens_N = batch.response_lens_S
    weights = loss_weights(batch, config, max_tokens=LENGTH)
    batch.add_columns(
        old_log_probs=log_probs.detach().flatten(),
        ref_log_probs=torch.full((batch.num_targets,), -2.0),
        advantages=broadcast_to_tokens(SCORES_Y - 0.5, lens_N),
        weights=broadcast_to_tokens(sampler_Y.sum(-1).exp(), lens_N),
        mean_weights=weights["mean_weights"],
    )
    outputs = TokenOutputs(log_probs_K=log_probs.flatten().float(), entropy_K=entropy.flatten().float())
    loss = policy_loss(outputs, batch, config=config, kl_coef=config.kl_coef).loss
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])


def test_without_the_servers_log_probs_nothing_is_compared() -> None:
    silent = replace(sampled([-1.0, -2.0]), log_probs=None)
    for items in ([silent], [silent, sampled([-1.0])]):
        batch = batch_of(items)
        assert "rollout_log_probs" not in batch.columns
        assert compare_with_rollout(batch, RolloutCorrection()) == {}


@pytest.mark.parametrize("bounds", [{"max_ratio": 1.0}, {"min_ratio": 1.0, "max_ratio": 2.0}])
def test_a_ratio_at_a_bound_is_inside(bounds: dict[str, float]) -> None:
    batch = batch_of([sampled([-1.0, -2.0])])
    batch.add_columns(old_log_probs=batch.columns["rollout_log_probs"].clone())
    correction = RolloutCorrection(mode="mask", **bounds)  # type: ignore[arg-type]
    weights: Any = correction_weights(batch, correction)
    assert weights.tolist() == [1.0, 1.0]
    assert compare_with_rollout(batch, correction)["rollout/correction_outside_share"] == 0


def test_jobs_that_need_the_servers_log_probs_are_refused_without_them() -> None:
    silent = RolloutConfig(log_probs=False)
    JobConfig(rollout=silent, oversampling=OversamplingConfig(extra_prompts=2, partial_rollouts=False))
    with raises(InputError, field="rollout.log_probs", allowed="true"):
        JobConfig(rollout=silent, oversampling=OversamplingConfig(extra_prompts=2))
    with raises(InputError, field="rollout.log_probs", allowed="true"):
        JobConfig(rollout=replace(silent, kv_cache_dtype="fp8"))


def test_the_correction_repairs_a_stale_rollout() -> None:
    """The older policy samples, six updates later the loss has the gradient of samples of the new policy.

    All terms of the loss, and exact expectations instead of samples: no noise hides a wrong weight.
    """
    older = random_model(tiny_config(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    policy = copy.deepcopy(older)
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
    for _ in range(6):
        optimizer.zero_grad()
        (-(outputs_of(policy)[0].sum(-1).exp() * SCORES_Y).sum()).backward()
        optimizer.step()
    older_Y, policy_Y = (outputs_of(model)[0].detach() for model in (older, policy))
    on_policy = expected_gradient(policy, policy_Y, RolloutCorrection())

    def error(**settings: Any) -> float:
        gradient = expected_gradient(policy, older_Y, RolloutCorrection(**settings))
        return float((gradient - on_policy).norm() / on_policy.norm())

    stale = error()
    assert stale > 1
    assert error(mode="truncate", level="sequence", max_ratio=1e4) < 1e-5, "exact within the bounds"
    assert error(mode="mask", level="sequence", max_ratio=1e4) < 1e-5
    assert error(mode="truncate") < 0.6 * stale, "token weights are biased, but closer"
    assert error(mode="truncate", level="geometric") < 0.8 * stale
