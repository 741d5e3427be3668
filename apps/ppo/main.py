"""PPO with a critic: `python -m apps.ppo.main [preset=NAME] [section.key=value ...]`, `--help` lists every key.

Without a model and data it runs the built-in demo: a tiny Qwen3 model learns to add, after a supervised warm start.

A step samples responses, scores them, estimates values and advantages (GAE), updates the policy with the clipped loss
and the critic with the returns, and pushes the new weights to the servers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import ds_engine
import rl_core
import rl_runtime
from apps.ppo.config import AlgorithmConfig, PpoConfig

if TYPE_CHECKING:
    import torch


def critic_loss(
    outputs: "ds_engine.ValueOutputs", batch: "ds_engine.TokenBatch", *, value_clip: float | None
) -> "ds_engine.LossOutput":
    """The micro batch's share of the value loss, the token mean of 1/2 max((V - R)^2, (V_clipped - R)^2)."""
    columns = batch.columns
    loss_K, clipped_K = rl_core.value_loss(outputs.values_K, columns["returns"], columns["values"], clip=value_clip)
    loss = (columns["mean_weights"] * loss_K).sum()
    clip_fraction = (columns["mean_weights"] * clipped_K).sum()
    return ds_engine.LossOutput(loss=loss, metrics={"vf_loss": loss.detach(), "clip_fraction": clip_fraction})


def advantages(
    batch: "rl_runtime.ExperienceBatch", algorithm: AlgorithmConfig, *, kl_coef: float
) -> tuple["torch.Tensor", "torch.Tensor", dict[str, float]]:
    """Advantages and returns, float32 [K] each, and the critic's metrics."""
    lens_N, values_K = batch.response_lens_N, batch.flat("values")
    rewards_K = rl_core.token_rewards(batch.scores_N.float(), lens_N)
    metrics = {}
    if kl_coef:
        kl_K = rl_core.kl_estimate(batch.flat("old_log_probs"), batch.flat("ref_log_probs"), kind=algorithm.kl_kind)
        metrics["actor/ref_kl"] = float(kl_K.mean())
        if algorithm.kl_in == "reward":
            rewards_K = rewards_K - kl_coef * kl_K
    advantages_K, returns_K = rl_core.gae(rewards_K, values_K, lens_N, gamma=algorithm.gamma, lam=algorithm.lam)
    spread = float(returns_K.var(correction=0))
    metrics |= {
        "critic/values/mean": float(values_K.mean()),
        "critic/returns/mean": float(returns_K.mean()),
        # Equal returns have no variance to explain, except for rounding.
        "critic/explained_variance": 1 - float((returns_K - values_K).var(correction=0)) / spread
        if spread > 1e-12
        else 0.0,
        "actor/advantage_std": float(advantages_K.std(correction=0)),
    }
    if algorithm.whiten_advantages:
        advantages_K = rl_core.masked_whiten(advantages_K)
    return advantages_K, returns_K, metrics


class KlCoefficient:
    """The coefficient of the KL term, fixed or adaptive; saved in checkpoints."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._controller: rl_core.FixedKL | rl_core.AdaptiveKL = rl_core.FixedKL(coefficient=algorithm.kl_coef)
        if algorithm.kl_target is not None:
            self._controller = rl_core.AdaptiveKL(
                coefficient=algorithm.kl_coef, target=algorithm.kl_target, horizon=algorithm.kl_horizon
            )

    @property
    def value(self) -> float:
        """Current KL coefficient."""
        return self._controller.coefficient

    def update(self, kl: float, num_samples: int) -> None:
        """Adapts the coefficient after a step with the mean KL per token `kl`."""
        self._controller = self._controller.updated(kl, num_samples)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"coefficient": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`."""
        self._controller = replace(self._controller, coefficient=state["coefficient"])


def learn(
    step: int,
    batch: "rl_runtime.ExperienceBatch",
    phase: "rl_runtime.Phase",
    *,
    config: PpoConfig,
    actor: "rl_runtime.ModelHandle",
    critic: "rl_runtime.ModelHandle",
    ref: "rl_runtime.ModelHandle | None",
    kl: KlCoefficient,
) -> dict[str, float]:
    """One PPO update on scored samples; returns its metrics."""
    algorithm, kl_coef = config.algorithm, kl.value
    actor_loss = partial(
        rl_runtime.policy_loss, config=algorithm, kl_coef=kl_coef if algorithm.kl_in == "loss" else 0.0
    )
    value_loss = partial(critic_loss, value_clip=algorithm.value_clip)
    mini_batches = batch.mini_batch_indices(config.batch.mini_batch_size)
    batch = rl_runtime.with_loss_weights(
        batch, algorithm, max_tokens=config.sampling.max_tokens, mini_batches=mini_batches
    )
    actor_updates, critic_updates = [], []
    with rl_runtime.TrainBatch.of(batch, mini_batches=mini_batches) as train_batch:
        old, values = rl_runtime.run_concurrently(
            phase,
            ("old_log_prob", actor, lambda: actor.log_probs(train_batch, column="old_log_probs").log_probs),
            ("values", critic, lambda: critic.values(train_batch, column="values")),
        )
        batch = batch.with_column("old_log_probs", old).with_column("values", values)
        if ref is not None:
            with phase("ref_log_prob"):
                of_ref = ref.log_probs(train_batch, column="ref_log_probs")
                batch = batch.with_column("ref_log_probs", of_ref.log_probs)
        with phase("adv"):
            advantages_K, returns_K, metrics = advantages(batch, algorithm, kl_coef=kl_coef)
            train_batch.add_columns({"advantages": advantages_K, "returns": returns_K})
        for _ in range(algorithm.num_epochs):
            for mini_batch in train_batch.mini_batches:
                updates = [("update_critic", critic, partial(critic.update, mini_batch, value_loss))]
                if step > algorithm.critic_warmup_steps:
                    updates.append(("update_actor", actor, partial(actor.update, mini_batch, actor_loss)))
                of_critic, *of_actor = rl_runtime.run_concurrently(phase, *updates)
                critic_updates.append(of_critic)
                actor_updates += of_actor
    if ref is not None:
        metrics["actor/kl_coef"] = kl_coef
        kl.update(metrics["actor/ref_kl"], len(batch.items))
    metrics |= rl_runtime.update_metrics("critic", critic_updates)
    metrics |= rl_runtime.update_metrics("actor", actor_updates) if actor_updates else {}
    return metrics | rl_runtime.mismatch(batch, old)


def num_updates(config: PpoConfig) -> tuple[int, int]:
    """Optimizer steps of the actor and of the critic over the whole run."""
    per_step = rl_runtime.job_layout(config).num_mini_batches * config.algorithm.num_epochs
    steps = config.trainer.total_training_steps
    return per_step * (steps - config.algorithm.critic_warmup_steps), per_step * steps


def check(config: PpoConfig) -> "rl_runtime.JobPlan":
    """Refuses settings that cannot work before any process starts; plans devices and resume."""
    of_actor, of_critic = num_updates(config)
    own = {"critic": config.trainer.num_critic_ranks} if config.trainer.num_critic_ranks else {}
    engines = {"actor": (config.actor, of_actor), "critic": (config.critic, of_critic)}
    return rl_runtime.check_job(config, engines, own_ranks=own)


def compose(job: "rl_runtime.Job", config: PpoConfig) -> "rl_runtime.Algorithm":
    """Builds the actor, the critic and, with a KL term, the reference model; returns the update of a step."""
    of_actor, of_critic = num_updates(config)
    actor = job.trained("actor", config.actor, num_updates=of_actor)
    critic = job.trained("critic", config.critic, num_updates=of_critic, head="value")
    ref = job.frozen("ref", config.actor) if config.algorithm.kl_coef else None
    kl = KlCoefficient(config.algorithm)
    step = partial(learn, config=config, actor=actor, critic=critic, ref=ref, kl=kl)
    return rl_runtime.Algorithm(roles={"actor": actor, "critic": critic}, learn=step, state={"kl": kl})


def main(config: PpoConfig) -> None:
    """Runs the job and prints its summary."""
    rl_runtime.run_job(config, check(config), partial(compose, config=config))


def cli(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the app from its command line; `argv` defaults to the arguments of the process."""
    presets = Path(__file__).parent / "presets"
    rl_runtime.run_job_cli(PpoConfig, main, app_name="apps.ppo.main", preset_dir=presets, argv=argv)


if __name__ == "__main__":
    cli()
