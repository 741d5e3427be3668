"""The policy loss by name: the micro batches' shares, the bounds, losses of users, filtered responses."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine import TokenOutputs
from plinth_testing import write_tiny_model
from rl_core import PackedBatch, SequenceData, cispo_loss, gspo_loss, pack, ppo_clip_loss, rollout_weights
from rl_data import Prompt
from rl_runtime import Experience, ExperienceBatch, InputError, PolicyConfig, check_loss, policy_loss, with_loss_weights
from rl_runtime.training.off_policy import RolloutCorrection

sys.path.insert(0, str(Path(__file__).parent))  # where a user's own functions are

NAMES = ("ppo_clip", "gspo", "cispo", "rl_runtime_own_losses:reinforce")
COLUMNS = ("log_probs", "old_log_probs", "ref_log_probs", "advantages", "entropy")


def sequences(lens: list[int], seed: int) -> list[SequenceData]:
    """Sequences with columns; the loss weights are those of the token mean."""
    random, total = np.random.default_rng(seed), sum(lens)
    scale = {"advantages": 1.0, "entropy": 1.0}
    return [
        SequenceData(
            prompt_ids=[0],
            response_ids=[1] * length,
            columns={
                **{name: random.normal(size=length) * scale.get(name, 0.3) for name in COLUMNS},
                "weights": np.full(length, 1 / total),
                "mean_weights": np.full(length, 1 / total),
                "rollout_log_probs": random.normal(size=length) * 0.3,
            },
        )
        for length in lens
    ]


def shares(batch: PackedBatch, config: PolicyConfig, kl_coef: float = 0.2) -> dict[str, float]:
    outputs = TokenOutputs(log_probs_K=batch.columns["log_probs"], entropy_K=batch.columns["entropy"])
    found = policy_loss(outputs, batch, config=config, kl_coef=kl_coef)
    return {name: float(value) for name, value in {"loss": found.loss, **found.metrics}.items()}


def parts(items: list[SequenceData], sizes: list[int]) -> Iterator[list[SequenceData]]:
    left = list(items)
    while left:
        size = sizes.pop() if sizes else len(left)
        yield left[:size]
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
    items, config = sequences(lens, seed), PolicyConfig(loss=name, entropy_coef=0.1)
    found: dict[str, float] = {}
    for part in parts(items, sizes):
        for key, value in shares(pack(part), config).items():
            found[key] = found.get(key, 0.0) + value
    assert found == pytest.approx(shares(pack(items), config), rel=1e-4, abs=1e-5)


BOUNDS: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "default": ({}, {}),
    "given": ({"clip_low": 0.05, "clip_high": 0.07}, {"clip_low": 0.05, "clip_high": 0.07}),
    "zero": ({"clip_low": 0.0}, {"clip_low": 0.0}),
}


@pytest.mark.parametrize("bounds", BOUNDS)
def test_each_loss_has_the_bounds_that_are_given_or_those_of_its_paper(bounds: str) -> None:
    given_bounds, expected = BOUNDS[bounds]
    batch = pack(sequences([5, 7, 2], seed=3))
    columns = batch.columns
    inputs = columns["log_probs"], columns["old_log_probs"], columns["advantages"]
    losses = {
        "ppo_clip": ppo_clip_loss(*inputs, **expected),  # type: ignore[arg-type]
        "gspo": gspo_loss(*inputs, batch.response_lens_S, **expected),  # type: ignore[arg-type]
        "cispo": cispo_loss(*inputs, **expected),  # type: ignore[arg-type]
    }
    for name, (loss_K, stats) in losses.items():
        found = shares(batch, PolicyConfig(loss=name, **given_bounds), kl_coef=0.0)  # type: ignore[arg-type]
        assert found["pg_loss"] == found["loss"] == pytest.approx(float(loss_K.mean()), rel=1e-5)
        assert found["clip_fraction"] == pytest.approx(float(stats.clipped_K.float().mean()))
        assert found["ratio"] == pytest.approx(float(stats.ratio_K.mean()), rel=1e-5)


def test_a_loss_of_the_user_gets_its_options_and_the_common_terms() -> None:
    batch = pack(sequences([5, 7], seed=1))
    log_probs_K, advantages_K = batch.columns["log_probs"], batch.columns["advantages"]
    ratio_K = (log_probs_K - batch.columns["old_log_probs"]).exp()
    config = PolicyConfig(loss="rl_runtime_own_losses:reinforce", loss_options={"scale": 3.0}, entropy_coef=0.5)
    check_loss(config)
    found = shares(batch, config)
    assert found["pg_loss"] == pytest.approx(float((-3 * advantages_K * log_probs_K).mean()), rel=1e-5)
    assert found["loss"] == pytest.approx(found["pg_loss"] + 0.2 * found["kl"] - 0.5 * found["entropy"], rel=1e-4)
    assert found["ratio"] == pytest.approx(float(ratio_K.mean()), rel=1e-5)
    assert found["clip_fraction"] == 0


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        ("rl_runtime_own_losses:nobody", {}, "has no function 'nobody'"),
        ("no_such_module:loss", {}, "cannot be imported"),
        (
            "rl_runtime_own_losses:reinforce",
            {"sclae": 1.0},
            r"cannot be called as reinforce\(log_probs_K, batch, sclae\)",
        ),
        ("rl_runtime_own_losses:summed", {}, r"returned shape \(\); allowed: one loss per token, \(5,\)"),
        ("rl_runtime_own_losses:detached", {}, "has no gradient"),
        ("rl_runtime_own_losses:infinite", {}, "not finite"),
        ("rl_runtime_own_losses:raising", {}, "fails on a trial batch: KeyError: 'rewards'"),
        ("rl_runtime_own_losses:textual", {}, "returned str"),
    ],
)
def test_a_loss_of_the_user_that_cannot_work_is_refused_with_the_reason(loss: str, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"algorithm.loss is '{loss}'.*{message}"):
        check_loss(PolicyConfig(loss=loss, loss_options=options))


def test_a_kl_term_in_the_reward_is_not_in_the_loss() -> None:
    batch = pack(sequences([5, 7], seed=1))
    in_reward = shares(batch, PolicyConfig(kl_in="reward"))
    assert "kl" not in in_reward
    assert in_reward == shares(batch, PolicyConfig(), kl_coef=0.0)


def test_rollout_weights_multiply_every_term_of_the_loss() -> None:
    items = sequences([5, 7], seed=1)
    correction = RolloutCorrection(mode="truncate")
    corrected = shares(pack(items), PolicyConfig(rollout_correction=correction, entropy_coef=0.1))
    weighed = []
    for item in items:
        old_K, rollout_K = (torch.as_tensor(item.columns[name]) for name in ("old_log_probs", "rollout_log_probs"))
        weights_K = torch.as_tensor(item.columns["weights"]) * rollout_weights(old_K, rollout_K)[0]
        weighed.append(replace(item, columns={**item.columns, "weights": weights_K.numpy()}))
    assert corrected == pytest.approx(shares(pack(weighed), PolicyConfig(entropy_coef=0.1)), rel=1e-5)


def scored(length: int, reason: str) -> Experience:
    return Experience(
        prompt=Prompt("p", "p", (1,), "1", "gsm8k"),
        group_id=0,
        sample_index=0,
        response_ids=tuple(range(length)),
        response_text="",
        rollout_log_probs=np.zeros(length, np.float32),
        finish_reason=reason,
        version_spans=((0, length),),
        score=0.0,
    )


@pytest.mark.parametrize(
    ("mode", "kept"),
    [("token_mean", 1 / 5), ("seq_mean_token_sum", 1 / 2), ("fixed_length", 1 / 16)],
)
def test_filtered_responses_have_no_weight_and_are_not_counted(mode: Any, kept: float) -> None:
    batch = ExperienceBatch(items=(scored(2, "stop"), scored(8, "length"), scored(3, "stop")))
    config = PolicyConfig(overlong_filter=True, loss_aggregation=mode)
    weights = with_loss_weights(batch, config, max_tokens=8).columns
    assert [row.tolist() for row in weights["weights"]] == [
        pytest.approx([kept] * 2),
        [0.0] * 8,
        pytest.approx([kept] * 3),
    ]
    assert float(np.concatenate(weights["mean_weights"]).sum()) == pytest.approx(1)
    everything = with_loss_weights(batch, replace(config, overlong_filter=False), max_tokens=8).columns
    assert everything["weights"][1].min() > 0


def test_a_mini_batch_of_filtered_responses_has_a_loss_of_zero() -> None:
    batch = ExperienceBatch(items=(scored(8, "length"),))
    weights = with_loss_weights(batch, PolicyConfig(overlong_filter=True), max_tokens=8).flat("weights")
    assert torch.equal(weights, torch.zeros(8))


@pytest.mark.slow
def test_sequence_parallel_ranks_make_the_same_update_with_gspo(tmp_path: Path) -> None:
    """It needs whole sequences: every rank gets all outputs of a micro batch, whatever slice it computes."""
    script = Path(__file__).with_name("rl_runtime_policy_loss_worker.py")
    command = [sys.executable, str(script), str(write_tiny_model(tmp_path))]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
