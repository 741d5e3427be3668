"""GRPO and its relatives without a critic: `plinth grpo [preset=NAME] [section.key=value ...]`.

`--help all` lists all keys; presets `grpo dr_grpo dapo rloo reinforce_pp reinforce_pp_baseline remax gspo cispo` set
the algorithm. Without a model and data it runs the built-in demo: a tiny Qwen3 model learns to add, after a supervised
warm start.

A step samples n responses to each prompt, scores them, compares the scores (with those of the same prompt, in GRPO),
updates the policy with the clipped loss, and pushes the new weights to the servers.
"""

from functools import partial

import rl_core
import rl_runtime
from apps.grpo.config import GrpoConfig


def learn(
    step: int,
    batch: "rl_core.Batch",
    phase: "rl_runtime.Phase",
    *,
    config: GrpoConfig,
    actor: "rl_runtime.ModelHandle",
    ref: "rl_runtime.Reference | None",
    kl: "rl_runtime.KlCoefficient",
) -> dict[str, float]:
    """One update on scored samples; returns its metrics."""
    algorithm, max_tokens = config.algorithm, config.sampling.response_tokens
    loss_fn = partial(rl_runtime.policy_loss, config=algorithm, kl_coef=kl.value)
    mini_batches = rl_core.split_mini_batches(batch.per_sequence["group_ids"].tolist(), config.batch.mini_batch_size)
    batch.add_columns(**rl_runtime.loss_weights(batch, algorithm, max_tokens=max_tokens, mini_batches=mini_batches))
    with rl_runtime.TrainBatch(batch, mini_batches=mini_batches) as train_batch:
        old = rl_runtime.OldLogProbs(actor, train_batch, defer_first=algorithm.may_defer_log_probs(config.actor))
        with phase("old_log_prob"):
            old.compute()
        if ref is not None:
            with phase("ref_log_prob"):
                batch.add_columns(ref_log_probs=ref.log_probs(train_batch))
        with phase("adv"):
            columns, metrics = rl_runtime.advantages(batch, algorithm, max_tokens=max_tokens, kl_coef=kl.value)
            batch.add_columns(**columns)
        with phase("update_actor"):
            updates = [old.update(mini, loss_fn) for mini in algorithm.num_epochs * train_batch.mini_batches]
    metrics |= rl_runtime.compare_with_rollout(batch, algorithm.rollout_correction)
    metrics |= kl.after_step(metrics, batch.num_sequences)
    return metrics | rl_runtime.update_metrics("actor", updates)


def num_updates(config: GrpoConfig) -> int:
    """Optimizer steps of the whole run."""
    per_step = rl_runtime.job_layout(config).num_mini_batches * config.algorithm.num_epochs
    return per_step * config.trainer.num_steps


def check(config: GrpoConfig) -> "rl_runtime.JobPlan":
    """Refuses settings that cannot work before any process starts; plans devices and resume."""
    plan = rl_runtime.check_job(config, {"actor": (config.actor, num_updates(config))})
    rl_runtime.check_loss(config.algorithm)
    return plan


def compose(job: "rl_runtime.Job", config: GrpoConfig) -> "rl_runtime.Algorithm":
    """Builds the actor and, with a KL term, the reference model; returns the update of a step."""
    actor = job.trained("actor", config.actor, num_updates=num_updates(config))
    ref = job.reference(actor) if config.algorithm.kl_coef else None
    kl = rl_runtime.KlCoefficient(config.algorithm)
    step = partial(learn, config=config, actor=actor, ref=ref, kl=kl)
    return rl_runtime.Algorithm(roles={"actor": actor}, learn=step, state={"kl": kl})


def main(config: GrpoConfig) -> None:
    """Runs the job and prints its summary."""
    resolved = rl_runtime.resolve_job(config)
    rl_runtime.run_job(resolved, check(resolved.config), partial(compose, config=resolved.config))


cli = partial(rl_runtime.run_job_cli, GrpoConfig, main)
"""Runs the app from its command line."""


if __name__ == "__main__":
    cli()
