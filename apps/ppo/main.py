"""PPO with a critic: `plinth ppo [preset=NAME] [section.key=value ...]`, `--help all` lists all keys.

Without a model and data it runs the built-in demo: a tiny Qwen3 model learns to add, after a supervised warm start.

A step samples responses, scores them, estimates values and advantages (GAE), updates the policy with the clipped loss
and the critic with the returns, and pushes the new weights to the servers.
"""

from functools import partial

import ds_engine
import rl_core
import rl_runtime
from apps.ppo.config import PpoConfig


def critic_loss(
    outputs: "ds_engine.ValueOutputs", batch: "ds_engine.TokenBatch", *, value_clip: float | None
) -> "ds_engine.LossOutput":
    """The micro batch's share of the value loss, the token mean of 1/2 max((V - R)^2, (V_clipped - R)^2)."""
    columns = batch.columns
    loss_K, clipped_K = rl_core.value_loss(outputs.values_K, columns["returns"], columns["values"], clip=value_clip)
    loss = (columns["mean_weights"] * loss_K).sum()
    clip_fraction = (columns["mean_weights"] * clipped_K).sum()
    return ds_engine.LossOutput(loss=loss, metrics={"vf_loss": loss.detach(), "clip_fraction": clip_fraction})


def learn(
    step: int,
    batch: "rl_core.Batch",
    phase: "rl_runtime.Phase",
    *,
    config: PpoConfig,
    actor: "rl_runtime.ModelHandle",
    critic: "rl_runtime.ModelHandle",
    ref: "rl_runtime.Reference | None",
    kl: "rl_runtime.KlCoefficient",
) -> dict[str, float]:
    """One PPO update on scored samples; returns its metrics."""
    algorithm, max_tokens = config.algorithm, config.sampling.response_tokens
    actor_loss = partial(rl_runtime.policy_loss, config=algorithm, kl_coef=kl.value)
    value_loss = partial(critic_loss, value_clip=algorithm.value_clip)
    trains_actor = step > algorithm.critic_warmup_steps
    defer_first = trains_actor and algorithm.may_defer_log_probs(config.actor)
    mini_batches = rl_core.split_mini_batches(batch.per_sequence["group_ids"].tolist(), config.batch.mini_batch_size)
    batch.add_columns(**rl_runtime.loss_weights(batch, algorithm, max_tokens=max_tokens, mini_batches=mini_batches))
    actor_updates, critic_updates = [], []
    with rl_runtime.TrainBatch(batch, mini_batches=mini_batches) as train_batch:
        old = rl_runtime.OldLogProbs(actor, train_batch, defer_first=defer_first)
        rl_runtime.run_concurrently(
            phase,
            ("old_log_prob", actor, old.compute),
            ("values", critic, lambda: batch.add_columns(values=critic.values(train_batch))),
        )
        if ref is not None:
            with phase("ref_log_prob"):
                batch.add_columns(ref_log_probs=ref.log_probs(train_batch))
        with phase("adv"):
            columns, metrics = rl_runtime.advantages(
                batch,
                algorithm,
                max_tokens=max_tokens,
                kl_coef=kl.value,
                lam=algorithm.lam,
                whiten=algorithm.whiten_advantages,
            )
            batch.add_columns(**columns)
        for mini_batch in algorithm.num_epochs * train_batch.mini_batches:
            updates = [("update_critic", critic, partial(critic.update, mini_batch, value_loss))]
            if trains_actor:
                updates.append(("update_actor", actor, partial(old.update, mini_batch, actor_loss)))
            critic_update, *actor_update = rl_runtime.run_concurrently(phase, *updates)
            critic_updates.append(critic_update)
            actor_updates += actor_update
    metrics |= rl_runtime.compare_with_rollout(batch, algorithm.rollout_correction)
    metrics |= kl.after_step(metrics, batch.num_sequences) | rl_runtime.update_metrics("critic", critic_updates)
    return metrics | (rl_runtime.update_metrics("actor", actor_updates) if actor_updates else {})


def num_updates(config: PpoConfig) -> tuple[int, int]:
    """Optimizer steps of the actor and of the critic over the whole run."""
    per_step = rl_runtime.job_layout(config).num_mini_batches * config.algorithm.num_epochs
    steps = config.trainer.num_steps
    return per_step * (steps - config.algorithm.critic_warmup_steps), per_step * steps


def check(config: PpoConfig) -> "rl_runtime.JobPlan":
    """Refuses settings that cannot work before any process starts; plans devices and resume."""
    num_actor, num_critic = num_updates(config)
    plan = rl_runtime.check_job(config, {"actor": (config.actor, num_actor), "critic": (config.critic, num_critic)})
    rl_runtime.check_loss(config.algorithm)
    return plan


def compose(job: "rl_runtime.Job", config: PpoConfig) -> "rl_runtime.Algorithm":
    """Builds the actor, the critic and, with a KL term, the reference model; returns the update of a step."""
    num_actor, num_critic = num_updates(config)
    actor = job.trained("actor", config.actor, num_updates=num_actor)
    critic = job.trained("critic", config.critic, num_updates=num_critic, head="value")
    ref = job.reference(actor) if config.algorithm.kl_coef else None
    kl = rl_runtime.KlCoefficient(config.algorithm)
    step = partial(learn, config=config, actor=actor, critic=critic, ref=ref, kl=kl)
    return rl_runtime.Algorithm(roles={"actor": actor, "critic": critic}, learn=step, state={"kl": kl})


def main(config: PpoConfig) -> None:
    """Runs the job and prints its summary."""
    resolved = rl_runtime.resolve_job(config)
    rl_runtime.run_job(resolved, check(resolved.config), partial(compose, config=resolved.config))


cli = partial(rl_runtime.run_job_cli, PpoConfig, main)
"""Runs the app from its command line."""


if __name__ == "__main__":
    cli()
