"""The policy loss by name: the micro batches' shares, the bounds, losses of users, filtered responses."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_runtime_samples import sample

from ds_engine import TokenOutputs
from plinth_testing import RankPool, raises, write_tiny_model
from rl_core import Batch, cispo_loss, gspo_loss, pack, ppo_clip_loss, rollout_weights
from rl_runtime import InputError, PolicyConfig, check_loss, loss_weights, policy_loss
from rl_runtime.samples import batch_of
from rl_runtime.training.off_policy import RolloutCorrection

NAMES = ("gspo", "rl_runtime_own_losses:reinforce")  # rl_core tests each of its losses by itself
COLUMNS = ("log_probs", "old_log_probs", "ref_log_probs", "advantages", "entropy", "rollout_log_probs")


def batch_with_columns(lens: list[int], seed: int) -> Batch:
    """A batch with all columns of a loss; the loss weights are those of the token mean."""
    random, total = np.random.default_rng(seed), sum(lens)
    scale = {"advantages": 1.0, "entropy": 1.0}
    columns = {name: torch.from_numpy(random.normal(size=total) * scale.get(name, 0.3)) for name in COLUMNS}
    columns |= {name: torch.full((total,), 1 / total) for name in ("weights", "mean_weights")}
    return pack([[0]] * len(lens), [[1] * length for length in lens], columns=columns)


def shares(batch: Batch, config: PolicyConfig, kl_coef: float = 0.2) -> dict[str, float]:
    outputs = TokenOutputs(log_probs_K=batch.columns["log_probs"], entropy_K=batch.columns["entropy"])
    output = policy_loss(outputs, batch, config=config, kl_coef=kl_coef)
    return {name: float(value) for name, value in {"loss": output.loss, **output.metrics}.items()}


def parts(batch: Batch, sizes: list[int]) -> Iterator[Batch]:
    left = list(range(batch.num_sequences))
    while left:
        size = sizes.pop() if sizes else len(left)
        yield batch.select(left[:size])
        left = left[size:]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(
    lens=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 3), max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
def test_shares_of_micro_batches_add_up_to_those_of_the_whole_batch(
    name: str, lens: list[int], sizes: list[int], seed: int
) -> None:
    batch, config = batch_with_columns(lens, seed), PolicyConfig(loss=name, entropy_coef=0.1)
    sums: dict[str, float] = {}
    for part in parts(batch, sizes):
        for key, value in shares(part, config).items():
            sums[key] = sums.get(key, 0.0) + value
    assert sums == pytest.approx(shares(batch, config), rel=1e-4, abs=1e-5)


BOUNDS: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "default": ({}, {}),
    "given": ({"clip_low": 0.05, "clip_high": 0.07}, {"clip_low": 0.05, "clip_high": 0.07}),
    "zero": ({"clip_low": 0.0}, {"clip_low": 0.0}),
}


@pytest.mark.parametrize("bounds", BOUNDS)
def test_each_loss_has_the_bounds_that_are_given_or_those_of_its_paper(bounds: str) -> None:
    given_bounds, expected = BOUNDS[bounds]
    batch = batch_with_columns([5, 7, 2], seed=3)
    columns = batch.columns
    inputs = columns["log_probs"], columns["old_log_probs"], columns["advantages"]
    losses = {
        "ppo_clip": ppo_clip_loss(*inputs, **expected),  # type: ignore[arg-type]
        "gspo": gspo_loss(*inputs, batch.response_lens_S, **expected),  # type: ignore[arg-type]
        "cispo": cispo_loss(*inputs, **expected),  # type: ignore[arg-type]
    }
    for name, (loss_K, stats) in losses.items():
        metrics = shares(batch, PolicyConfig(loss=name, **given_bounds), kl_coef=0.0)  # type: ignore[arg-type]
        assert metrics["pg_loss"] == metrics["loss"] == pytest.approx(float(loss_K.mean()), rel=1e-5)
        assert metrics["clip_fraction"] == pytest.approx(float(stats.clipped_K.float().mean()))
        assert metrics["ratio"] == pytest.approx(float(stats.ratio_K.mean()), rel=1e-5)


def test_a_loss_of_the_user_gets_its_options_and_the_common_terms() -> None:
    batch = batch_with_columns([5, 7], seed=1)
    log_probs_K, advantages_K = batch.columns["log_probs"], batch.columns["advantages"]
    ratio_K = (log_probs_K - batch.columns["old_log_probs"]).exp()
    config = PolicyConfig(loss="rl_runtime_own_losses:reinforce", loss_options={"scale": 3.0}, entropy_coef=0.5)
    check_loss(config)
    metrics = shares(batch, config)
    assert metrics["pg_loss"] == pytest.approx(float((-3 * advantages_K * log_probs_K).mean()), rel=1e-5)
    assert metrics["loss"] == pytest.approx(
        metrics["pg_loss"] + 0.2 * metrics["kl"] - 0.5 * metrics["entropy"], rel=1e-4
    )
    assert metrics["ratio"] == pytest.approx(float(ratio_K.mean()), rel=1e-5)
    assert metrics["clip_fraction"] == 0


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        ("rl_runtime_own_losses:nobody", {}, "has no function 'nobody'"),
        ("no_such_module:loss", {}, "cannot be imported"),
        ("rl_runtime_own_losses:reinforce", {"sclae": 1.0}, "reinforce(log_probs_K, batch, sclae)"),
        ("rl_runtime_own_losses:summed", {}, "one loss per token"),
        ("rl_runtime_own_losses:detached", {}, "has no gradient"),
        ("rl_runtime_own_losses:infinite", {}, "not finite"),
        ("rl_runtime_own_losses:raising", {}, "KeyError: 'rewards'"),
        ("rl_runtime_own_losses:textual", {}, "got 'str'"),
    ],
)
def test_a_loss_of_the_user_that_cannot_work_is_refused_with_the_reason(loss: str, options: Any, message: str) -> None:
    with raises(InputError, field="algorithm.loss", value=loss) as caught:
        check_loss(PolicyConfig(loss=loss, loss_options=options))
    assert message in caught.value.problem


def test_a_kl_term_in_the_reward_is_not_in_the_loss() -> None:
    batch = batch_with_columns([5, 7], seed=1)
    in_reward = shares(batch, PolicyConfig(kl_in="reward"))
    assert "kl" not in in_reward
    assert in_reward == shares(batch, PolicyConfig(), kl_coef=0.0)


def test_rollout_weights_multiply_every_term_of_the_loss() -> None:
    batch = batch_with_columns([5, 7], seed=1)
    corrected = shares(batch, PolicyConfig(rollout_correction=RolloutCorrection(mode="truncate"), entropy_coef=0.1))
    columns = dict(batch.columns)
    weights_K, _ = rollout_weights(columns["old_log_probs"], columns["rollout_log_probs"])
    columns["weights"] = columns["weights"] * weights_K
    weighed = replace(batch, columns=columns)
    assert corrected == pytest.approx(shares(weighed, PolicyConfig(entropy_coef=0.1)), rel=1e-5)


@pytest.mark.parametrize(
    ("mode", "kept"), [("token_mean", 1 / 5), ("seq_mean_token_sum", 1 / 2), ("fixed_length", 1 / 16)]
)
def test_filtered_responses_have_no_weight_and_are_not_counted(mode: Any, kept: float) -> None:
    batch = batch_of([sample(2), sample(8, finish_reason="length"), sample(3)])
    config = PolicyConfig(overlong_filter=True, loss_aggregation=mode)
    columns = loss_weights(batch, config, max_tokens=8)
    assert columns["weights"].tolist() == pytest.approx([kept] * 2 + [0.0] * 8 + [kept] * 3)
    assert float(columns["mean_weights"].sum()) == pytest.approx(1)
    everything = loss_weights(batch, replace(config, overlong_filter=False), max_tokens=8)
    assert float(everything["weights"].min()) > 0


def test_a_mini_batch_of_filtered_responses_has_a_loss_of_zero() -> None:
    batch = batch_of([sample(8, finish_reason="length")])
    weights_K = loss_weights(batch, PolicyConfig(overlong_filter=True), max_tokens=8)["weights"]
    assert weights_K.tolist() == [0.0] * 8


@pytest.mark.slow
@pytest.mark.long
def test_sequence_parallel_ranks_make_the_same_update_with_gspo(two_ranks: RankPool, tmp_path: Path) -> None:
    """It needs whole sequences: every rank gets all outputs of a micro batch, whatever slice it computes."""
    two_ranks.run("update_with_gspo", folder=str(write_tiny_model(tmp_path)))
