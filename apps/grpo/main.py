"""GRPO, top to bottom: `python -m apps.grpo.main [preset=NAME] [section.key=value ...]`, `--help` lists every key.

Without a model or data it runs the built-in demo: a tiny Qwen3 model learns to add, after a short supervised start.

A step is: ask the servers for n answers to each prompt, score them, compare each with its group, raise the likelihood
of the better ones within the clip range, and push the new weights into the servers.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import ds_engine
import rl_core
import rl_data
import rl_runtime
from apps.grpo.config import AlgorithmConfig, GrpoConfig
from rl_runtime import run_cli


def grpo_loss(
    outputs: "ds_engine.TokenOutputs", batch: "ds_engine.TokenBatch", *, algorithm: AlgorithmConfig
) -> "ds_engine.LossOutput":
    """This micro batch's share of the loss: sum_k w_k (clipped policy loss + kl_coef KL - entropy_coef H)_k."""
    columns, log_probs_K = batch.columns, outputs.log_probs_K
    weights_K, mean_K = columns["weights"], columns["mean_weights"]
    loss_K, stats = rl_core.ppo_clip_loss(
        log_probs_K,
        columns["old_log_probs"],
        columns["advantages"],
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
    )
    metrics = {
        "pg_loss": (weights_K * loss_K).sum().detach(),
        "clip_fraction": (mean_K * stats.clipped_K).sum().detach(),
        "entropy": (mean_K * outputs.entropy_K).sum().detach(),
    }
    if algorithm.kl_coef:
        kl_K = rl_core.kl_loss(
            log_probs_K, columns["ref_log_probs"], kind=algorithm.kl_kind, old_log_probs_K=columns["old_log_probs"]
        )
        loss_K = loss_K + algorithm.kl_coef * kl_K
        metrics["kl"] = (mean_K * kl_K).sum().detach()
    if algorithm.entropy_coef:
        loss_K = loss_K - algorithm.entropy_coef * outputs.entropy_K
    return ds_engine.LossOutput(loss=(weights_K * loss_K).sum(), metrics=metrics)


def learn(
    batch: "rl_runtime.ExperienceBatch",
    phase: "rl_runtime.Phase",
    *,
    config: GrpoConfig,
    actor: "rl_runtime.Role",
    ref: "rl_runtime.Role | None",
) -> dict[str, float]:
    """One GRPO step on scored samples; the metrics of its updates."""
    advantages_N = rl_core.group_advantages(
        batch.scores_N, batch.group_ids_N, normalize_by_std=config.algorithm.normalize_by_std
    )
    batch = batch.with_constant("advantages", advantages_N)
    with phase("old_log_prob"):
        old = actor.log_probs(batch)
        batch = batch.with_column("old_log_probs", old.log_probs)
    if ref is not None:
        with phase("ref_log_prob"):
            batch = batch.with_column("ref_log_probs", ref.log_probs(batch).log_probs)

    aggregation, max_tokens = config.algorithm.loss_aggregation, config.sampling.max_tokens
    loss_fn = partial(grpo_loss, algorithm=config.algorithm)
    updates = []
    with phase("update_actor"):
        for _ in range(config.algorithm.num_epochs):
            for mini in batch.mini_batches(config.batch.mini_batch_size):
                weights_N = rl_core.token_weights(
                    aggregation,
                    mini.response_lens_N,
                    fixed_length=max_tokens if aggregation == "fixed_length" else None,
                )
                mean_N = rl_core.token_weights("token_mean", mini.response_lens_N)
                mini = mini.with_constant("weights", weights_N).with_constant("mean_weights", mean_N)
                updates.append(actor.update(mini, loss_fn))
    return rl_runtime.update_metrics("actor", updates) | {
        "rollout/log_prob_mismatch": rl_runtime.mismatch(batch, old.log_probs),
        "actor/advantage_std": float(advantages_N.std(correction=0)),
    }


def layout(config: GrpoConfig) -> "rl_core.BatchLayout":
    """How the batch divides over mini batches and ranks; refuses one that does not."""
    return rl_core.batch_layout(config.batch, samples_per_prompt=config.sampling.n, dp=config.trainer.num_ranks)


def check(config: GrpoConfig) -> "rl_runtime.Placement":
    """Refuses what cannot work before any process starts; which process runs on which device."""
    rl_runtime.prepare_driver(config.trainer.device)
    num_updates = layout(config).num_mini_batches * config.algorithm.num_epochs * config.trainer.total_training_steps
    rl_runtime.check_tracking(config.tracking)
    placement = rl_runtime.plan_session(config.trainer, config.rollout)
    rl_runtime.check_prompt_files(config.model, config.data)
    rl_runtime.check_supervised(config.model, config.data, config.warm_start, section="warm_start")
    rl_runtime.check_engine(config.actor, section="actor", num_updates=num_updates)
    validates = config.data.val or not config.data.train
    samplings = [config.sampling, config.validation] if validates else [config.sampling]
    rl_runtime.check_lengths(config.rollout, config.data, samplings)
    rl_runtime.check_servers(config.model, config.rollout, config.sync, placement)
    rl_runtime.find_checkpoint(config.trainer)
    return placement


def main(config: GrpoConfig) -> None:
    """Runs the job and prints what it reached."""
    placement = check(config)
    run = rl_runtime.RunFolder.create(config.trainer.output_dir, config.trainer.experiment)
    with (
        rl_runtime.MemorySampler(interval_s=config.tracking.memory_interval_s) as memory,
        rl_runtime.Tracker(run, config, num_steps=config.trainer.total_training_steps) as tracker,
    ):
        tracker.info(f"run folder {run.path}; starting {config.trainer.num_ranks} ranks and the servers")
        inputs = rl_runtime.load_inputs(
            config.model, config.data, config.warm_start, config.task, folder=run.path, seed=config.trainer.seed
        )
        with rl_runtime.open_session(
            placement,
            trainer=config.trainer,
            rollout=config.rollout,
            model_path=str(inputs.model_path),
            log_dir=run.path / "servers",
            sync=config.sync,
        ) as session:
            result = train(config, run.path, inputs, session, tracker, memory)
        tracker.summary(result)


def train(
    config: GrpoConfig,
    folder: Path,
    inputs: "rl_runtime.Inputs",
    session: "rl_runtime.Session",
    tracker: "rl_runtime.Tracker",
    memory: "rl_runtime.MemorySampler",
) -> "rl_runtime.LoopResult":
    """Warm start if asked for, then the GRPO steps, then the export."""
    temperature = config.sampling.temperature
    resumed = rl_runtime.find_checkpoint(config.trainer)
    model_path = warm_start(config, folder, inputs, session, tracker, skip=resumed is not None)

    actor = rl_runtime.Role(session.ranks, "actor", config.batch, temperature=temperature)
    num_updates = layout(config).num_mini_batches * config.algorithm.num_epochs * config.trainer.total_training_steps
    actor.build(model_path, config.actor, total_steps=num_updates)
    ref = None
    if config.algorithm.kl_coef:
        ref = rl_runtime.Role(session.ranks, "ref", config.batch, temperature=temperature)
        ref.build_frozen(model_path, config.actor)

    session.servers.wait_ready()
    actor.connect_servers(session.servers.endpoints, config.sync)
    loop = rl_runtime.TrainingLoop(
        trainer=config.trainer,
        sampling=config.sampling,
        validation=config.validation,
        train_batch_size=config.batch.train_batch_size,
        train_prompts=inputs.train_prompts,
        val_prompts=inputs.val_prompts,
        sampler=rl_data.PromptSampler(len(inputs.train_prompts), seed=config.trainer.seed, shuffle=config.data.shuffle),
        session=session,
        roles={"actor": actor},
        rollout=rl_runtime.RolloutPhase(
            session.client, inputs.tokenizer, reward=config.reward, seed=config.trainer.seed
        ),
        tracker=tracker,
        memory=memory,
        checkpoint_dir=folder / "checkpoints",
        resumed=resumed,
    )
    result = loop.run(partial(learn, config=config, actor=actor, ref=ref))
    if config.trainer.export_model:
        actor.export(str(folder / "model"), model_path)
    return result


def warm_start(
    config: GrpoConfig,
    folder: Path,
    inputs: "rl_runtime.Inputs",
    session: "rl_runtime.Session",
    tracker: "rl_runtime.Tracker",
    *,
    skip: bool,
) -> str:
    """The folder of the model that GRPO starts from: the given one, or that after supervised steps on it.

    A resumed run (`skip`) takes what the run it goes on from started with.
    """
    if not config.warm_start.steps:
        return str(inputs.model_path)
    if skip:
        return str(Path(config.trainer.resume_from or "") / "warm_start_model")
    model = rl_runtime.Role(session.ranks, "actor", config.batch)
    engine = replace(config.actor, optim=config.warm_start.optim)
    model.build(str(inputs.model_path), engine, total_steps=config.warm_start.steps)
    rl_runtime.train_supervised(
        model, inputs.demonstrations, config.warm_start, seed=config.trainer.seed, on_step=tracker.log_supervised
    )
    warm = str(folder / "warm_start_model")
    model.export(warm, str(inputs.model_path))
    return warm


def cli() -> None:
    """The command line."""
    run_cli(
        GrpoConfig,
        main,
        app_name="apps.grpo.main",
        preset_dir=Path(__file__).parent / "presets",
        default_preset="demo",
        default_preset_unless=("model.path", "data.train"),
    )


if __name__ == "__main__":
    # Through the importable name, so that the ranks are sent grpo_loss as a reference and not as a copy of its globals.
    from apps.grpo import main as app

    app.cli()
