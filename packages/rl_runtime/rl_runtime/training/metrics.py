"""The metrics of a step as pure functions of its data; docs/metrics.md defines them."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ds_engine import StepStats
from rl_core import Batch, mismatch_metrics, segment_sum
from rollout_vllm import Sample

from ..ranks.model_handle import is_skipped
from ..rollout.groups import Collected

# Established names; every other mismatch metric is `rollout/mismatch_` and rl_core's name.
_MISMATCH = {"abs_mean": "log_prob_mismatch", "abs_max": "log_prob_mismatch_max", "kl_k3": "mismatch_kl"}
_FEW_DRAFTS = 0.1
"""Drafts per step of a sequence with which speculative decoding changes little."""
_NO_ROUNDING = 0.5
"""Mean difference of log-probs that rounding does not make: in bfloat16 it was 0.005 to 0.04 on GPUs (benchmarks), and
1.8 where servers and ranks had nothing in common (benchmarks/small_cards)."""


def rollout_metrics(collected: Collected) -> dict[str, float]:
    """Scores and lengths of the scored samples of a step, number of failures, and the metrics of the servers."""
    samples = collected.scored
    scores = np.array([sample.score for sample in samples], np.float64)
    response_lens = np.array([sample.num_generated for sample in samples])
    prompt_lens = np.array([sample.prompt_ids.size for sample in samples])
    baselines = {sample.prompt_id: sample.baseline_score for sample in samples if sample.baseline_score is not None}
    return {
        "critic/score/mean": float(scores.mean()),
        "critic/score/max": float(scores.max()),
        "critic/score/min": float(scores.min()),
        "critic/score/std": float(scores.std()),
        "response_length/mean": float(response_lens.mean()),
        "response_length/max": float(response_lens.max()),
        "response_length/min": float(response_lens.min()),
        "response_length/clip_ratio": float(np.mean([sample.finish_reason == "length" for sample in samples])),
        "prompt_length/mean": float(prompt_lens.mean()),
        "prompt_length/max": float(prompt_lens.max()),
        "rollout/num_samples": float(len(collected.samples)),
        "rollout/num_failed": float(collected.num_failed),
        "rollout/num_turns": float(np.mean([sample.num_turns for sample in samples])),
        "rollout/num_paths": float(np.mean([len(sample.paths) for sample in samples])),
        **({"rollout/baseline_score_mean": float(np.mean(list(baselines.values())))} if baselines else {}),
        **term_metrics(samples),
        **({} if collected.reading is None else collected.reading.result()),
        **collected.metrics,
    }


def term_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean and standard deviation of each term of the reward, before its weight; empty if there is one reward."""
    terms = [sample.reward_terms for sample in samples]
    columns = {name: np.array([values[name] for values in terms]) for name in (terms[0] if terms else ())}
    return {
        f"reward/{name}/{statistic}": float(compute(values))
        for name, values in columns.items()
        for statistic, compute in (("mean", np.mean), ("std", np.std))
    }


def mismatch(batch: Batch) -> dict[str, float]:
    """Difference between the trainer's and the servers' log-probs of the same generated tokens (`rl_core`'s metrics).

    Tokens that an older policy version sampled differ by the updates in between, and are reported separately, with
    `_stale` at the end of the names. The ratios of a sequence are those of its fresh, or of its stale, tokens.

    Args:
        batch: with columns `old_log_probs`, `rollout_log_probs` and `staleness`.
    """
    columns = batch.columns
    stale_K = columns["staleness"] > 0

    def of_tokens(chosen_K: torch.Tensor, suffix: str) -> dict[str, float]:
        if not chosen_K.any():
            return {}
        lens_N = segment_sum(chosen_K.double(), batch.response_lens_S).long()
        values = mismatch_metrics(
            columns["old_log_probs"][chosen_K], columns["rollout_log_probs"][chosen_K], response_lens_S=lens_N
        )
        del values["num_tokens"]  # `stale_token_share` and the response lengths say it
        return {f"rollout/{_MISMATCH.get(name, f'mismatch_{name}')}{suffix}": value for name, value in values.items()}

    metrics = of_tokens(~stale_K, "") | of_tokens(stale_K, "_stale")
    return metrics | {"rollout/stale_token_share": float(stale_K.double().mean())}


def disagreement(metrics: Mapping[str, float], *, is_exact: bool = False) -> str:
    """A warning if servers and ranks compute different policies, from the metrics of `mismatch`; empty: they agree.

    `is_exact`: actor.match_servers, with which no bit may differ.

    Without a mismatch, or with one that is nan, nothing is compared: a loss that is nan has a warning of its own.
    """
    difference = metrics.get("rollout/log_prob_mismatch", 0.0)
    if is_exact and 0 < difference < _NO_ROUNDING:
        return (
            "warning: servers and ranks do not have the same bits (actor.match_servers): their log-probs of the newest "
            f"tokens differ by up to {metrics['rollout/log_prob_mismatch_max']:.2g} (rollout/log_prob_mismatch_max). "
            "See docs/exact.md#other-models"
        )
    if not difference >= _NO_ROUNDING:
        return ""
    return (
        f"warning: servers and ranks compute different policies: their log-probs of the newest tokens differ by "
        f"{difference:.2g} on average (rollout/log_prob_mismatch; rounding makes less than {_NO_ROUNDING}), and the "
        f"effective sample size is {metrics['rollout/mismatch_ess']:.2g}. "
        "See docs/troubleshooting.md#updates-nan-and-mismatch"
    )


def drafts_rarely(metrics: Mapping[str, float]) -> str:
    """A line if the servers of a run with rollout.speculative make few drafts; empty: they draft, or never do."""
    drafts = metrics.get("rollout/drafts_per_step", _FEW_DRAFTS)
    return (
        f"rollout.speculative: servers make {drafts:.2g} drafts per step of a sequence "
        f"({metrics['rollout/draft_acceptance']:.0%} accepted): steps without drafts are faster, or responses repeat "
        "nothing. Servers without the key are faster still: set it to none"
        if drafts < _FEW_DRAFTS
        else ""
    )


def update_metrics(prefix: str, stats: Sequence[StepStats]) -> dict[str, float]:
    """Metrics over the optimizer steps of one training step: means over the updates made; sums for counts.

    Where all updates were skipped, the means are over those, and not finite.
    """
    num_skipped = sum(map(is_skipped, stats))
    made = [s for s in stats if not is_skipped(s)] or stats
    names = dict.fromkeys(name for s in stats for name in s.metrics)
    return {
        f"{prefix}/loss": float(np.mean([s.loss for s in made])),
        f"{prefix}/grad_norm": float(np.mean([s.grad_norm for s in made])),
        f"{prefix}/lr": stats[-1].lr,
        f"{prefix}/num_updates": float(len(stats) - num_skipped),
        f"{prefix}/num_skipped_updates": float(num_skipped),
        f"{prefix}/num_micro_batches": float(sum(s.num_micro_batches for s in stats)),
        f"{prefix}/guarded_collectives": float(sum(s.num_guarded_collectives for s in stats)),
        f"{prefix}/skipped_inactive_micro": float(sum(s.num_skipped_empty_micro_batches for s in stats)),
        **{f"{prefix}/{name}": float(np.mean([s.metrics[name] for s in made])) for name in names},
    }
