"""On-policy distillation: `plinth distill teacher.model=MODEL [preset=NAME] [section.key=value ...]`.

`--help` lists every key. Without a model and data the built-in student learns to add from the teacher that you give.

A step samples responses of the student; the teacher scores their tokens, on vLLM servers or on the trainer's ranks; the
update moves the student toward the teacher where the student goes itself, and toward the reward if it has a weight.
"""

from functools import partial

import rl_core
import rl_runtime
from apps.distill.config import DistillConfig


def learn(
    step: int,
    batch: "rl_runtime.ExperienceBatch",
    phase: "rl_runtime.Phase",
    *,
    config: DistillConfig,
    actor: "rl_runtime.ModelHandle",
    teacher: "rl_runtime.ServerTeacher | rl_runtime.RankTeacher",
) -> dict[str, float]:
    """One update on samples of the student; returns its metrics."""
    algorithm, wanted, max_tokens = config.algorithm, config.teacher, config.sampling.max_tokens
    mini_batches = batch.mini_batch_indices(config.batch.mini_batch_size)
    batch = rl_runtime.with_loss_weights(batch, algorithm, max_tokens=max_tokens, mini_batches=mini_batches)
    loss_fn = partial(rl_runtime.distillation_loss, config=algorithm, weight=wanted.weight)
    term = partial(rl_runtime.teacher_term, kind=wanted.divergence, beta=wanted.beta)
    metrics: dict[str, float] = {}
    updates = []
    with rl_runtime.TrainBatch.of(batch, mini_batches=mini_batches) as train_batch:
        finish = teacher.start(batch)
        with phase("old_log_prob"):
            old = actor.log_probs(train_batch, column="old_log_probs").log_probs
            batch = batch.with_column("old_log_probs", old)
        with phase("teacher"):
            of_teacher = finish(train_batch).get("teacher_log_probs")
        with phase("adv"):
            old_K, lens_N = batch.flat("old_log_probs"), batch.response_lens_N
            advantages_K = 0.0 * old_K
            if algorithm.reward_weight:
                columns, metrics = rl_runtime.advantages(batch, algorithm, max_tokens=max_tokens)
                advantages_K = algorithm.reward_weight * columns["advantages"]
            if of_teacher is not None:
                metrics["teacher/kl"] = float((old_K - of_teacher).mean())
            if of_teacher is not None and wanted.signal == "sampled":
                of_tokens = rl_core.distillation_advantages(old_K, of_teacher, lens_N, gamma=wanted.discount)
                advantages_K = advantages_K + wanted.weight * of_tokens
            metrics |= rl_runtime.compare_with_rollout(batch, old_K, algorithm.rollout_correction)
            train_batch.add_columns({"advantages": advantages_K} | rl_runtime.rollout_columns(batch))
        with phase("update_actor"):
            head_term = None if wanted.signal == "sampled" else term
            for _ in range(algorithm.num_epochs):
                for mini_batch in train_batch.mini_batches:
                    updates.append(actor.update(mini_batch, loss_fn, head_term=head_term, **teacher.update_arguments()))
    metrics |= rl_runtime.update_metrics("actor", updates)
    if "actor/teacher_divergence" in metrics:
        metrics["teacher/divergence"] = metrics.pop("actor/teacher_divergence")
    return metrics


def num_updates(config: DistillConfig) -> int:
    """Optimizer steps of the whole run."""
    per_step = rl_runtime.job_layout(config).num_mini_batches * config.algorithm.num_epochs
    return per_step * config.trainer.total_training_steps


def check(config: DistillConfig) -> "rl_runtime.JobPlan":
    """Refuses settings that cannot work before any process starts; plans devices and resume."""
    plan = rl_runtime.check_job(config, {"actor": (config.actor, num_updates(config))})
    rl_runtime.check_loss(config.algorithm)
    rl_runtime.check_teacher(config, config.teacher, plan.placement)
    return plan


def compose(job: "rl_runtime.Job", config: DistillConfig) -> "rl_runtime.Algorithm":
    """Starts the teacher and builds the student; returns the update of a step."""
    actor = job.trained("actor", config.actor, num_updates=num_updates(config))
    teacher = rl_runtime.open_teacher(job, config.teacher)
    return rl_runtime.Algorithm(
        roles={"actor": actor}, learn=partial(learn, config=config, actor=actor, teacher=teacher)
    )


def main(config: DistillConfig) -> None:
    """Runs the job and prints its summary."""
    resolved = rl_runtime.resolve_job(config)
    rl_runtime.run_job(resolved, check(resolved.config), partial(compose, config=resolved.config))


cli = partial(rl_runtime.run_job_cli, DistillConfig, main)
"""Runs the app from its command line."""


if __name__ == "__main__":
    cli()
