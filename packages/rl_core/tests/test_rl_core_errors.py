"""Arguments that do not fit are refused with the name and the value of the argument."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from plinth_testing import raises
from rl_core import (
    ADVANTAGES,
    AdaptiveKL,
    ArgumentError,
    BatchConfig,
    BatchError,
    FixedKL,
    ShapeError,
    TeacherHead,
    TeacherTopK,
    batch_layout,
    bootstrap_mean,
    bradley_terry_loss,
    distillation_advantages,
    divergence,
    dpo_loss,
    gae,
    group_advantages,
    informative_groups,
    kl_estimate,
    kto_kl,
    kto_loss,
    linear_divergence,
    linear_log_prob,
    majority_vote,
    masked_whiten,
    overlong_penalty,
    pack,
    pass_at_k,
    plan_micro_batches,
    ppo_clip_loss,
    rollout_weights,
    segment_sum,
    select_groups,
    split_mini_batches,
    token_rewards,
    token_weights,
    value_loss,
)

ZERO, ZEROS, ONES = torch.zeros(1), torch.zeros(2), torch.ones(3)
ROWS, IDS = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)
HEAD = TeacherHead(hidden_KG=torch.zeros(2, 3), weight_VG=torch.zeros(4, 3))
TOP_K = TeacherTopK(ids_KC=IDS[:1], log_probs_KC=ROWS)


def log_prob(**change: Any) -> object:
    arguments: dict[str, Any] = {"hidden": torch.zeros(4, 8), "weight": torch.zeros(20, 8), "targets": IDS.new_zeros(4)}
    return linear_log_prob(**arguments | change)


def student(teacher: Any, temperature: float = 1.0) -> object:
    return linear_divergence(torch.zeros(2, 4), torch.zeros(5, 4), teacher, temperature)


Call = Callable[[], object]
NUMBERS: list[tuple[Call, str, object]] = [
    (lambda: dpo_loss(ZEROS, ZEROS, beta=0.0), "beta", 0.0),
    (lambda: dpo_loss(ZEROS, ZEROS, kind="hinge"), "kind", "hinge"),  # type: ignore[arg-type]
    (lambda: dpo_loss(ZEROS, ZEROS, label_smoothing=0.5), "label_smoothing", 0.5),
    (lambda: dpo_loss(ZEROS, ZEROS, label_smoothing=0.1, kind="ipo"), "label_smoothing", 0.1),
    (lambda: kto_loss(ZEROS, ZEROS > 0, 0.0, undesirable_weight=-1.0), "undesirable_weight", -1.0),
    (lambda: bradley_terry_loss(ZEROS, ZEROS, center_coef=-1.0), "center_coef", -1.0),
    (lambda: AdaptiveKL(coefficient=0.1, target=0), "target", 0),
    (lambda: FixedKL(coefficient=-1), "coefficient", -1),
    (lambda: token_rewards(ZERO, torch.tensor([2]), kl_coefficient=0.1), "kl_coefficient", 0.1),
    (lambda: overlong_penalty(ONES, max_length=10, buffer_length=0), "buffer_length", 0),
    (lambda: select_groups(ZERO, ZERO, 0), "num_groups", 0),
    (lambda: informative_groups(ZERO, ZERO, min_spread=-1), "min_spread", -1),
    (lambda: pass_at_k([1], [2], 0), "k", 0),
    (lambda: pass_at_k([1], [2], 3), "num_samples_P", 2),
    (lambda: pass_at_k([3], [2], 1), "num_right_P", [3]),
    (lambda: pass_at_k([-1], [2], 1), "num_right_P", [-1]),
    (lambda: bootstrap_mean([float("inf")]), "values_P", [float("inf")]),
    (lambda: bootstrap_mean([1.0], num_resamples=0), "num_resamples", 0),
    (lambda: bootstrap_mean([1.0], confidence=1.0), "confidence", 1.0),
    (lambda: group_advantages(ONES, ONES, eps=-1), "eps", -1),
    (lambda: masked_whiten(ONES, eps=-1), "eps", -1),
    (lambda: gae(ONES, ONES, torch.tensor([3]), lam=1.5), "lam", 1.5),
    (lambda: ppo_clip_loss(ZERO, ZERO, ZERO, clip_low=2.0), "clip_low", 2.0),
    (lambda: ppo_clip_loss(ZERO, ZERO, ZERO, clip_high=-1.0), "clip_high", -1.0),
    (lambda: ppo_clip_loss(ZERO, ZERO, ZERO, dual_clip=1.0), "dual_clip", 1.0),
    (lambda: rollout_weights(ZERO, ZERO, max_ratio=0.0), "max_ratio", 0.0),
    (lambda: rollout_weights(ZERO, ZERO, min_ratio=5.0), "min_ratio", 5.0),
    (lambda: rollout_weights(ZERO, ZERO, level="sequence"), "level", "sequence"),
    (lambda: rollout_weights(ZERO, ZERO, mode="drop"), "mode", "drop"),  # type: ignore[arg-type]
    (lambda: kl_estimate(ZERO, ZERO, "k4"), "kind", "k4"),  # type: ignore[arg-type]
    (lambda: value_loss(ZERO, ZERO, ZERO, clip=0.0), "clip", 0.0),
    (lambda: divergence(ROWS, ROWS, kind="jsd", beta=1.0), "beta", 1.0),
    (lambda: distillation_advantages(ONES, ONES, torch.tensor([3]), gamma=1.5), "gamma", 1.5),
    (lambda: student(HEAD, 0.0), "temperature", 0.0),
    (lambda: token_weights("fixed_length", ONES), "fixed_length", None),
    (lambda: token_weights("token_mean", ONES, fixed_length=3), "fixed_length", 3),
    (lambda: token_weights("mean", ONES), "mode", "mean"),  # type: ignore[arg-type]
    (lambda: BatchConfig(token_budget=0), "token_budget", 0),
    (lambda: pack([[1]], [[2]], columns={"a": ZERO}).add_columns(a=ZERO), "a", ...),
    (lambda: log_prob(temperature=0.0), "temperature", 0.0),
    (lambda: log_prob(soft_cap=-1.0), "soft_cap", -1.0),
    (lambda: log_prob(keep_bytes=-1), "keep_bytes", -1),
    (lambda: log_prob(backend="cuda"), "backend", "cuda"),
    (lambda: log_prob(backend="triton"), "backend", "triton"),
    (lambda: log_prob(weight=torch.zeros(20, 8).double()), "weight", torch.float64),
    (lambda: log_prob(targets=torch.tensor([0, 1, 2, 20])), "targets", 20),
    (lambda: log_prob(targets=torch.tensor([0, 1, 2, -100])), "targets", -100),
]
SHAPES: list[tuple[Call, str, object]] = [
    (lambda: bradley_terry_loss(ZEROS, ZERO), "chosen_P", ...),
    (lambda: dpo_loss(ROWS, ROWS), "chosen_log_ratios_P", (2, 3)),
    (lambda: kto_loss(ZEROS, ZEROS > 0, ZEROS), "kl", (2,)),
    (lambda: kto_kl(torch.zeros(0)), "mismatched_log_ratios_N", 0),
    (lambda: token_rewards(ZERO, torch.tensor([2]), kl_K=ONES), "kl_K", (3,)),
    (lambda: pass_at_k([1, 2], [3], 1), "num_right_P", (2,)),
    (lambda: majority_vote([0], []), "votes", 1),
    (lambda: bootstrap_mean([]), "values_P", (0,)),
    (lambda: group_advantages(ONES, ZEROS), "scores_N", ...),
    (lambda: segment_sum(ONES, torch.tensor([2])), "lens_S", 2),
    (lambda: divergence(ROWS, ROWS[:, :2]), "log_probs_KC", ...),
    (lambda: divergence(ROWS[0], ROWS[0]), "log_probs_KC", (3,)),
    (lambda: student(TOP_K), "ids_KC, log_probs_KC", ((1, 3), (2, 3))),
    (lambda: student(HEAD), "hidden_KG, weight_VG", ((2, 3), (4, 3))),
    (lambda: pack([[1], []], [[2], []]), "sequence 1", ...),
    (lambda: pack([[1], []], [[2], [2]]), "sequence 1", ...),
    (lambda: pack([[1], [1]], [[2], [2]], masks=[None, [True, False]]), "mask of sequence 1", (2,)),
    (lambda: pack([[1], [1]], [[2]]), "prompts, responses, masks", (2, 1, 0)),
    (lambda: pack([[1], [1]], [[2], [2]], per_sequence={"score": ZERO}), "score", (1,)),
    (lambda: pack([[1], [1]], [[2], [2]], columns={"a": ZERO}), "a", (1,)),
    (lambda: pack([[1], [1]], [[2], [2]], per_token={"a": ZERO}), "a", (1,)),
    (lambda: pack([[1]], [[2]]).split(ZEROS), "values_K", (2,)),
    (lambda: log_prob(bias=ONES), "bias", (3,)),
    (lambda: log_prob(weight=torch.zeros(20, 9)), "hidden, weight", ((4, 8), (20, 9))),
    (lambda: log_prob(targets=torch.zeros(4, dtype=torch.int32)), "targets", (4, "torch.int32")),
]
BATCHES: list[tuple[Call, str, object]] = [
    (lambda: plan_micro_batches([1], num_ranks=1), "token_budget", None),
    (lambda: plan_micro_batches([3, 0], num_ranks=1, token_budget=4), "lengths", 0),
    (lambda: plan_micro_batches([], num_ranks=1, token_budget=4), "lengths", []),
    (lambda: plan_micro_batches([1], num_ranks=0, token_budget=4), "num_ranks", 0),
    (lambda: split_mini_batches([1], 0), "num_groups", 0),
    (lambda: batch_layout(BatchConfig(), samples_per_prompt=0, dp=1), "samples_per_prompt", 0),
]


@pytest.mark.parametrize(("error", "calls"), [(ArgumentError, NUMBERS), (ShapeError, SHAPES), (BatchError, BATCHES)])
def test_bad_arguments_are_refused_by_field_and_value(error: type[Exception], calls: list[Any]) -> None:
    for call, field, value in calls:
        with raises(error, field=field, value=value):
            call()


def test_nan_is_no_number() -> None:
    for call in (
        lambda: dpo_loss(ZEROS, ZEROS, beta=float("nan")),
        lambda: log_prob(temperature=float("nan")),
        lambda: AdaptiveKL(coefficient=0.2, target=1.0).updated(float("nan"), 1),
    ):
        with raises(ArgumentError):
            call()


def test_sizes_of_a_batch_that_do_not_divide_are_refused_with_those_that_do() -> None:
    config = BatchConfig(train_batch_size=12, mini_batch_size=6, micro_batch_size=4)
    allowed = "mini_batch_size 4, 12, or micro_batch_size 1, 2, 3, 6, or samples per prompt 4"
    with raises(BatchError, field="mini_batch_size", value=6, allowed=allowed):
        batch_layout(config, samples_per_prompt=2, dp=2)
    allowed = "train_batch_size 10, 15 (with mini_batch_size a multiple of 5 that divides it), or samples per prompt 5"
    with raises(BatchError, field="mini_batch_size", value=6, allowed=allowed):
        batch_layout(BatchConfig(train_batch_size=12, mini_batch_size=6), samples_per_prompt=2, dp=5)
    with raises(ArgumentError, field="mini_batch_size", value=7, allowed="2, 3, 4, 6"):
        BatchConfig(train_batch_size=12, mini_batch_size=7)


def test_an_error_reads_as_a_sentence() -> None:
    with raises(ArgumentError) as caught:
        log_prob(targets=torch.tensor([0, 1, 2, 20]))
    assert str(caught.value) == "targets: got 20; allowed: 0 to 19; use ignore_index for tokens to ignore"


def test_an_advantage_names_the_inputs_that_it_lacks() -> None:
    with pytest.raises(KeyError) as caught:
        ADVANTAGES["remax"].estimate({"scores_N": torch.zeros(2)})
    assert "baseline_scores_N" in caught.value.args[0]
