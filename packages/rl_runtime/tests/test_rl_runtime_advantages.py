"""Advantages by name, compared with loops over samples and tokens; the KL coefficient over a run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_runtime_samples import sample

from plinth_testing import raises
from rl_core import ADVANTAGES, Batch
from rl_runtime import InputError, JobConfig, KlCoefficient, PolicyConfig, RolloutCorrection, advantages
from rl_runtime.resolve.resolved import with_value
from rl_runtime.rules import Feature
from rl_runtime.samples import batch_of
from rl_runtime.training.policy import POLICY_FEATURES
from rollout_vllm import SamplingConfig

NAMES = tuple(ADVANTAGES)


@dataclass(frozen=True, kw_only=True)
class PolicyJob(JobConfig):
    """A job with an algorithm, as the apps have it."""

    algorithm: PolicyConfig = field(default_factory=PolicyConfig)

    @property
    def features(self) -> tuple[Feature, ...]:
        return POLICY_FEATURES


MAX_TOKENS = 6
GAMMA, LAM = 0.9, 0.8


def make_batch(group_lengths: list[list[int]], seed: int) -> Batch:
    """Groups of samples with random scores, and all columns that advantages read."""
    random = np.random.default_rng(seed)
    items = []
    for group, lengths in enumerate(group_lengths):
        baseline = float(random.normal())
        for length in lengths:
            score = float(random.choice([0.0, 1.0, random.normal()]))
            reason = "length" if length == MAX_TOKENS else "stop"
            items.append(sample(length, group=group, score=score, baseline_score=baseline, finish_reason=reason))
    batch = batch_of(items)
    for name in ("old_log_probs", "ref_log_probs", "values"):
        batch.add_columns(**{name: torch.from_numpy(random.normal(size=batch.num_targets))})
    return batch


batches = st.builds(
    make_batch,
    st.lists(st.lists(st.integers(1, MAX_TOKENS), min_size=2, max_size=3), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
)


def rows_of(batch: Batch, name: str) -> list[np.ndarray]:
    return [row_K.double().numpy() for row_K in batch.split(batch.columns[name])]


def config_of(name: str, **options: Any) -> PolicyConfig:
    return PolicyConfig(advantage=name, gamma=GAMMA if ADVANTAGES[name].discounts else 1.0, kl_kind="k1", **options)


def by_loops(
    batch: Batch, name: str, scores: list[float], penalties: list[np.ndarray], turns: list[np.ndarray]
) -> list[np.ndarray]:
    """The advantages of each sample's tokens in plain numpy; `penalties` are subtracted from the rewards."""
    lens = batch.response_lens_S.tolist()
    rewards = [turn - penalty for turn, penalty in zip(turns, penalties, strict=True)]
    for row, score, turn in zip(rewards, scores, turns, strict=True):
        row[-1] += score - turn.sum()
    if name == "gae":
        return [gae_loop(row, value) for row, value in zip(rewards, rows_of(batch, "values"), strict=True)]
    if name == "reinforce_pp":
        return whitened([returns_loop(row) for row in rewards])
    totals = np.array(scores) - [penalty.sum() for penalty in penalties]
    # Samples of one turn, which all answer the same prompt: GiGPO compares each with its group twice.
    alike = {"turn_grpo": ("grpo", 1), "turn_rloo": ("rloo", 1), "gigpo": ("grpo", 2)}
    name, factor = alike.get(name, (name, 1))
    one_each = [factor * sample_loop(batch, name, totals, index) for index in range(len(lens))]
    rows = [np.full(length, value) for length, value in zip(lens, one_each, strict=True)]
    return whitened(rows) if name == "reinforce_pp_baseline" else rows


def sample_loop(batch: Batch, name: str, totals: np.ndarray, index: int) -> float:
    groups = batch.per_sequence["group_ids"].tolist()
    group = [i for i, other in enumerate(groups) if other == groups[index]]
    own = totals[group]
    if name == "remax":
        return float(totals[index] - batch.per_sequence["baseline_scores"][index])
    if name == "rloo":
        return float(totals[index] - np.mean([totals[i] for i in group if i != index]))
    centered = float(totals[index] - own.mean()) if np.ptp(own) else 0.0
    return centered / (float(own.std(ddof=1)) + 1e-6) if name == "grpo" else centered


def gae_loop(rewards: np.ndarray, values: np.ndarray) -> np.ndarray:
    out, carry, after = np.zeros(len(rewards)), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        carry = rewards[t] + GAMMA * after - values[t] + GAMMA * LAM * carry
        out[t], after = carry, values[t]
    return out


def returns_loop(rewards: np.ndarray) -> np.ndarray:
    return np.array([sum(GAMMA ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))])


def whitened(rows: list[np.ndarray]) -> list[np.ndarray]:
    flat = np.concatenate(rows)
    if len(flat) < 2 or np.ptp(flat) < 1e-6:
        return [np.zeros(len(row)) for row in rows]
    return [(row - flat.mean()) / (flat.std(ddof=1) + 1e-8) for row in rows]


def kl_rows(batch: Batch) -> list[np.ndarray]:
    pairs = zip(rows_of(batch, "old_log_probs"), rows_of(batch, "ref_log_probs"), strict=True)
    return [old - ref for old, ref in pairs]


def estimate(batch: Batch, config: PolicyConfig, kl_coef: float = 0.0) -> tuple[list[float], dict[str, float]]:
    columns, metrics = advantages(batch, config, max_tokens=MAX_TOKENS, kl_coef=kl_coef, lam=LAM)
    return columns["advantages"].tolist(), metrics


def has_spread(rows: list[np.ndarray]) -> bool:
    """True if whitening is well conditioned: it divides by the spread, which rounding alone must not determine."""
    return float(np.ptp(np.concatenate(rows))) > 1e-2


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(batch=batches, penalty=st.sampled_from([0.0, 0.5]))
def test_an_advantage_is_what_a_loop_over_samples_and_tokens_computes(
    name: str, kl_in: Any, batch: Batch, penalty: float
) -> None:
    config = config_of(name, kl_coef=0.3, kl_in=kl_in, overlong_penalty=penalty, overlong_buffer=4 if penalty else None)
    advantages, metrics = estimate(batch, config, kl_coef=0.3)
    lens, scores = batch.response_lens_S.tolist(), batch.per_sequence["scores"].tolist()
    shaped = [score - penalty * max(0, length - 2) / 4 for score, length in zip(scores, lens, strict=True)]
    penalties = [0.3 * row * (kl_in == "reward") for row in kl_rows(batch)]
    turns = [np.zeros(length) for length in lens]
    expected = by_loops(batch, name, shaped, penalties, turns)
    if name not in ("grpo", "turn_grpo", "gigpo", "reinforce_pp", "reinforce_pp_baseline") or has_spread(expected):
        assert advantages == pytest.approx(np.concatenate(expected).tolist(), rel=2e-3, abs=2e-3)
    assert metrics["actor/ref_kl"] == pytest.approx(np.concatenate(kl_rows(batch)).mean(), abs=1e-5)
    if penalty:
        assert metrics["overlong/num_penalized"] == sum(length > 2 for length in lens)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(batch=batches, data=st.data())
def test_advantages_do_not_depend_on_the_order_of_the_samples(name: str, batch: Batch, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(batch.num_sequences)))
    shuffled, _ = estimate(batch.select(order), config_of(name))
    rows = batch.split(torch.tensor(estimate(batch, config_of(name))[0]))
    assert shuffled == pytest.approx(torch.cat([rows[i] for i in order]).tolist(), rel=1e-3, abs=1e-3)


def test_rewards_of_turns_are_at_their_tokens_and_the_rest_of_the_score_at_the_last_one() -> None:
    """By hand: rewards 1 at the first and 2 at the third token; a score of 5 leaves 2 for the last."""
    batch = batch_of([sample(4, score=5.0, turn_rewards=np.array([1, 0, 2, 0], np.float32))])
    batch.add_columns(values=torch.zeros(4))
    columns, _ = advantages(batch, PolicyConfig(advantage="gae", gamma=0.5), max_tokens=8, lam=1.0)
    assert columns["returns"].tolist() == [1 + 0.5 * (0.5 * (2 + 0.5 * 2)), 0.5 * 3, 3, 2]
    assert columns["advantages"].tolist() == columns["returns"].tolist()
    per_sample, _ = advantages(batch, PolicyConfig(advantage="dr_grpo"), max_tokens=8)
    assert per_sample["advantages"].tolist() == [0] * 4


def test_turns_of_samples_are_compared_by_number_or_by_the_observation_that_they_answer() -> None:
    """By hand: two episodes of two turns, `context` between them; the second turns answer different observations."""
    mask = np.array([True, True, False, True])
    rewards = np.array([1, 0, 4], np.float32), np.array([0, 0, 2], np.float32)  # of sampled tokens
    batch = batch_of(
        [
            sample((5, 6, 7, 8), response_mask=mask, turn_rewards=rewards[0], score=5.0),
            sample((5, 6, 9, 8), response_mask=mask, turn_rewards=rewards[1], score=2.0),
        ]
    )
    config = PolicyConfig(advantage="turn_rloo", gamma=0.5)
    columns, _ = advantages(batch, config, max_tokens=8)
    assert columns["advantages"].tolist() == [2, 2, 2, -2, -2, -2]  # returns (3, 4) and (1, 2)
    columns, _ = advantages(batch, PolicyConfig(advantage="gigpo", gamma=0.5), max_tokens=8)
    half = 0.5**0.5  # GRPO's advantage in a group of two; only the first turns answer the same
    assert columns["advantages"].tolist() == pytest.approx(
        [2 * half, 2 * half, half, *[-2 * half] * 2, -half], abs=1e-5
    )


def test_turns_of_an_episode_that_branches_are_compared_with_those_of_other_episodes() -> None:
    """By hand: the returns of the first episode's turns are 1/4, 1/2 and, on the path of the latest turn, 1."""
    branches = tuple(replace(sample(ids), score=None) for ids in ((5, 8), (9,)))
    batch = batch_of(
        [
            replace(sample((5, 6, 7), score=1.0), branches=branches, num_turns=3),
            replace(sample((5, 6, 7), score=0.0), branches=branches[:1], num_turns=2),
        ]
    )
    columns, _ = advantages(batch, PolicyConfig(advantage="turn_rloo", gamma=0.5), max_tokens=8)
    rows = [row.unique().tolist() for row in batch.split(columns["advantages"])]
    assert rows == [[0], [0.25], [0.5], [-0.5], [-0.25]], "only one episode has a third turn"
    columns, _ = advantages(batch, PolicyConfig(advantage="gigpo"), max_tokens=8)
    half = 0.5**0.5  # each episode counts once; all turns answer the same prompt
    rest = (1 - 0.6) / np.std([1, 1, 1, 0, 0], ddof=1)
    assert columns["advantages"][0] == pytest.approx(half + rest, abs=1e-5)


def test_the_length_penalty_lowers_the_score_that_is_trained_on_and_nothing_else() -> None:
    batch = batch_of([sample(2, score=1.0), sample(6, score=1.0, finish_reason="length")])
    config = PolicyConfig(advantage="dr_grpo", overlong_penalty=0.5, overlong_filter=True)
    columns, metrics = advantages(batch, config, max_tokens=MAX_TOKENS)
    assert columns["advantages"].tolist() == [0.25] * 2 + [-0.25] * 6
    assert batch.per_sequence["scores"].tolist() == [1.0, 1.0]
    assert {name: value for name, value in metrics.items() if name.startswith("overlong/")} == {
        "overlong/num_penalized": 1,
        "overlong/penalty_mean": -0.25,
        "overlong/num_filtered": 1,
    }


def test_the_tokens_of_tools_count_for_the_length_penalty() -> None:
    """`sampling.max_tokens` limits the whole response: two of these six tokens were generated."""
    tools = np.array([True, False, False, False, False, True])
    batch = batch_of([sample(2, score=1.0), sample(6, score=1.0, response_mask=tools)])
    config = PolicyConfig(advantage="dr_grpo", overlong_penalty=0.5)
    columns, metrics = advantages(batch, config, max_tokens=MAX_TOKENS)
    assert columns["advantages"].tolist() == [0.25] * 2 + [-0.25] * 2
    assert metrics["overlong/num_penalized"] == 1


def test_whitening_leaves_the_targets_of_the_critic_alone() -> None:
    batch = batch_of([sample(2, score=1.0), sample(3, score=0.0)])
    batch.add_columns(values=torch.zeros(5))
    plain, _ = advantages(batch, PolicyConfig(advantage="gae"), max_tokens=8)
    white, _ = advantages(batch, PolicyConfig(advantage="gae"), max_tokens=8, whiten=True)
    assert white["returns"].tolist() == plain["returns"].tolist() == [1, 1, 0, 0, 0]
    assert float(white["advantages"].mean()) == pytest.approx(0, abs=1e-6)
    assert float(white["advantages"].std()) == pytest.approx(1)


def test_remax_without_the_score_of_a_greedy_response_is_refused() -> None:
    with pytest.raises(KeyError, match="baseline_scores"):
        advantages(batch_of([sample(2, score=1.0)]), PolicyConfig(advantage="remax"), max_tokens=8)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"advantage": "ppo"}, "advantage"),
        ({"gamma": 0.9}, "gamma"),
        ({"gamma": math.nan}, "gamma"),
        ({"loss": "ppo"}, "loss"),
        ({"loss": "gspo", "dual_clip": 3.0}, "dual_clip"),
        ({"loss": "a:b", "clip_low": 0.1}, "clip_low"),
        ({"loss_options": {"x": 1}}, "loss_options.x"),
        ({"clip_low": 2.0}, "clip_low"),
        ({"kl_target": 0.1}, "kl_target"),
        ({"kl_coef": 0.1, "kl_target": math.inf}, "kl_target"),
        ({"kl_horizon": 0.0}, "kl_horizon"),
        ({"kl_coef": math.inf}, "kl_coef"),
        ({"overlong_penalty": -1.0}, "overlong_penalty"),
        ({"overlong_buffer": 4}, "overlong_buffer"),
        ({"overlong_buffer": 0, "overlong_penalty": 1.0}, "overlong_buffer"),
        ({"entropy_coef": math.nan}, "entropy_coef"),
        ({"num_epochs": 0}, "num_epochs"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: Mapping[str, Any], field: str) -> None:
    with raises(ValueError, field=field):
        PolicyConfig(**options)


@pytest.mark.parametrize(
    ("options", "field", "wrong", "right"),
    [
        ({"advantage": "rloo"}, "sampling.n", 1, 2),
        ({"overlong_penalty": 1.0, "overlong_buffer": 9}, "sampling.max_tokens", 8, 9),
        ({"advantage": "gae"}, "dynamic_sampling.max_rounds", 2, 0),
        ({"rollout_correction": RolloutCorrection(mode="mask")}, "rollout.log_probs", False, True),
        ({"loss": "my:loss"}, "rollout.log_probs", False, True),
        ({"rollout_correction": RolloutCorrection(mode="truncate")}, "sampling.top_p", 0.9, 1.0),
        ({"rollout_correction": RolloutCorrection(mode="truncate")}, "sampling.top_k", 50, SamplingConfig().top_k),
        ({"rollout_correction": RolloutCorrection(mode="truncate")}, "sampling.min_p", 0.1, 0.0),
        ({"rollout_correction": RolloutCorrection(mode="truncate")}, "sampling.min_tokens", 2, 0),
        ({"rollout_correction": RolloutCorrection(mode="truncate")}, "sampling.repetition_penalty", 1.1, 1.0),
    ],
)
def test_sampling_that_does_not_fit_the_algorithm_is_refused(options: Any, field: str, wrong: Any, right: Any) -> None:
    def job(value: Any, **algorithm: Any) -> PolicyJob:
        config = PolicyJob(algorithm=PolicyConfig(**algorithm), sampling=SamplingConfig(n=2, temperature=0.7))
        result: PolicyJob = with_value(config, field, value)
        return result

    job(right, **options)
    if "overlong_buffer" not in options:
        job(wrong, **({"advantage": "reinforce_pp"} if field == "sampling.n" else {}))
    named = "algorithm.overlong_buffer" if "overlong_buffer" in options else field
    with raises(InputError, field=named):
        job(wrong, **options)


def test_an_adaptive_coefficient_resumes_and_a_fixed_one_is_that_of_the_configuration() -> None:
    adaptive = PolicyConfig(kl_coef=0.1, kl_target=0.01, kl_horizon=100)
    kl = KlCoefficient(adaptive)
    assert kl.after_step({"actor/ref_kl": 1.0}, 10) == {"actor/kl_coef": 0.1}, "far above the target: it rises"
    resumed = KlCoefficient(adaptive)
    resumed.load_state_dict(kl.state_dict())
    assert resumed.value == kl.value == pytest.approx(0.1 * 1.02)
    kl.after_step({"actor/ref_kl": 0.0}, 10)
    resumed.after_step({"actor/ref_kl": 0.0}, 10)
    assert resumed.value == kl.value
    fixed = KlCoefficient(PolicyConfig(kl_coef=0.5))
    fixed.load_state_dict(kl.state_dict())
    assert fixed.value == 0.5


def test_without_a_reference_the_coefficient_stays_and_has_no_metric() -> None:
    kl = KlCoefficient(PolicyConfig())
    assert kl.after_step({"actor/advantage_std": 1.0}, 10) == {}
