"""On-policy distillation: `plinth distill teacher.model=MODEL [preset=NAME] [section.key=value ...]`.

`--help all` lists all keys. Without a model and data the built-in student learns to add from the teacher that you give.

A step samples responses of the student; the teacher scores their tokens, on vLLM servers or on the trainer's ranks; the
update moves the student toward the teacher where the student goes itself, and toward the reward if it has a weight.
"""

from functools import partial

import rl_core
import rl_runtime
from apps.distill.config import DistillConfig


def learn(
    step: int,
    batch: "rl_core.Batch",
    phase: "rl_runtime.Phase",
    *,
    config: DistillConfig,
    actor: "rl_runtime.ModelHandle",
    teacher: "rl_runtime.ServerTeacher | rl_runtime.RankTeacher",
) -> dict[str, float]:
    """One update on samples of the student; returns its metrics."""
    algorithm, signal, max_tokens = config.algorithm, config.teacher, config.sampling.response_tokens
    loss_fn = partial(rl_runtime.distillation_loss, config=algorithm, weight=signal.weight)
    divergence = partial(rl_runtime.teacher_term, kind=signal.divergence, beta=signal.beta)
    head_term = None if signal.signal == "sampled" else divergence
    mini_batches = rl_core.split_mini_batches(batch.per_sequence["group_ids"].tolist(), config.batch.mini_batch_size)
    batch.add_columns(**rl_runtime.loss_weights(batch, algorithm, max_tokens=max_tokens, mini_batches=mini_batches))
    metrics: dict[str, float] = {}
    with rl_runtime.TrainBatch(batch, mini_batches=mini_batches) as train_batch:
        finish = teacher.start(batch)
        with phase("old_log_prob"):
            batch.add_columns(old_log_probs=actor.log_probs(train_batch))
        with phase("teacher"):
            finish(train_batch)
        with phase("adv"):
            old_K, teacher_K = batch.columns["old_log_probs"], batch.columns.get("teacher_log_probs")
            advantages_K = 0.0 * old_K
            if algorithm.reward_weight:
                columns, metrics = rl_runtime.advantages(batch, algorithm, max_tokens=max_tokens)
                advantages_K = algorithm.reward_weight * columns["advantages"]
            if teacher_K is not None:
                metrics["teacher/kl"] = float((old_K - teacher_K).mean())
            if teacher_K is not None and signal.signal == "sampled":
                teacher_advantages_K = rl_core.distillation_advantages(
                    old_K, teacher_K, batch.response_lens_S, gamma=signal.discount
                )
                advantages_K = advantages_K + signal.weight * teacher_advantages_K
            metrics |= rl_runtime.compare_with_rollout(batch, algorithm.rollout_correction)
            batch.add_columns(advantages=advantages_K)
        with phase("update_actor"):
            updates = [
                actor.update(mini, loss_fn, head_term=head_term, **teacher.update_arguments())
                for mini in algorithm.num_epochs * train_batch.mini_batches
            ]
    metrics |= rl_runtime.update_metrics("actor", updates)
    if "actor/teacher_divergence" in metrics:
        metrics["teacher/divergence"] = metrics.pop("actor/teacher_divergence")
    return metrics


def num_updates(config: DistillConfig) -> int:
    """Optimizer steps of the whole run."""
    per_step = rl_runtime.job_layout(config).num_mini_batches * config.algorithm.num_epochs
    return per_step * config.trainer.num_steps


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
