"""DPO, IPO and KTO: `plinth dpo [preset=NAME] [section.key=value ...]`, `--help all` lists all keys.

The policy learns from preferences without a reward model (docs/preference.md). The log-probs of all responses under
the initial policy, the reference, are computed once, before the first step, and kept in every checkpoint; there is no
second model. A step draws `supervised.batch_size` pairs (KTO: labeled responses), packs both responses of a pair into
one row, and descends on the mean loss. Every `trainer.test_freq` steps loss, accuracy and margins on held-out
preferences are measured. `trainer.resume=auto` continues a run from its newest checkpoint, bit for bit.

The policy is written to `<run folder>/model`. Without a model and data the app runs the preset `demo`.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ds_engine
import rl_core
import rl_runtime
from apps.dpo.config import AlgorithmConfig, DpoConfig

if TYPE_CHECKING:
    import torch


def losses(ratios_S: "torch.Tensor", labels_S: "torch.Tensor", kl: float, config: AlgorithmConfig) -> "torch.Tensor":
    """The loss of each pair (chosen, rejected, chosen, …), or of each labeled response."""
    if config.loss == "kto":
        weights = {"desirable_weight": config.desirable_weight, "undesirable_weight": config.undesirable_weight}
        return rl_core.kto_loss(ratios_S, labels_S > 0.5, kl, beta=config.beta, **weights)
    chosen_P, rejected_P = rl_runtime.of_pairs(ratios_S)
    smoothing = config.label_smoothing
    return rl_core.dpo_loss(chosen_P, rejected_P, kind=config.loss, beta=config.beta, label_smoothing=smoothing)


def statistics(
    ratios_S: "torch.Tensor", labels_S: "torch.Tensor", kl: float, config: AlgorithmConfig
) -> "dict[str, torch.Tensor]":
    """Per pair or labeled response: the implicit rewards, beta log-ratio, and whether they prefer what they should."""
    rewards_S = config.beta * ratios_S
    if config.loss == "kto":
        margin = (2.0 * labels_S - 1.0) * (rewards_S - config.beta * kl)
        rewards = {"margin": margin}
    else:
        chosen_P, rejected_P = rl_runtime.of_pairs(rewards_S)
        margin = chosen_P - rejected_P
        rewards = {"margin": margin, "chosen_reward": chosen_P, "rejected_reward": rejected_P}
    return {"accuracy": (margin > 0).float() + 0.5 * (margin == 0).float(), **rewards}


def preference_loss(
    outputs: "ds_engine.TokenOutputs", batch: "rl_core.Batch", *, num: int, kl: float, config: AlgorithmConfig
) -> "ds_engine.LossOutput":
    """The micro batch's share of the mean over all `num` pairs or labeled responses of the step."""
    ratios_S, labels_S = rl_runtime.log_ratios(outputs.log_probs_K, batch), batch.per_sequence["labels"]
    metrics = statistics(ratios_S.detach(), labels_S, kl, config)
    shares = {name: values.sum() / num for name, values in metrics.items()}
    return ds_engine.LossOutput(loss=losses(ratios_S, labels_S, kl, config).sum() / num, metrics=shares)


def kl_of(
    model: "rl_runtime.ModelHandle",
    preferences: "Sequence[Any]",
    config: DpoConfig,
    ref: "rl_runtime.ReferenceLogProbs",
) -> float:
    """KTO's reference point, from responses to other prompts; over the whole batch, whatever its split."""
    if config.algorithm.loss != "kto":
        return 0.0
    unrelated = [one.unrelated for one in preferences]
    log_probs_S = rl_runtime.sequence_log_probs(model, unrelated, batch_size=config.supervised.batch_size)
    return float(rl_core.kto_kl(log_probs_S - ref.of(unrelated)))


def learn(
    model: "rl_runtime.ModelHandle",
    preferences: "Sequence[Any]",
    *,
    config: DpoConfig,
    ref: "rl_runtime.ReferenceLogProbs",
) -> "ds_engine.StepStats":
    """One optimizer step on pairs, or on labeled responses."""
    responses, labels_S = rl_runtime.with_labels(preferences)
    kl = kl_of(model, preferences, config, ref)
    batch = rl_runtime.packed(responses, per_sequence={"ref": ref.of(responses), "labels": labels_S})
    loss = partial(preference_loss, num=len(preferences), kl=kl, config=config.algorithm)
    per_group = len(responses) // len(preferences)
    with rl_runtime.TrainBatch(batch, group_size=per_group) as train_batch:
        return model.update(train_batch.mini_batches[0], loss)


def measure(
    model: "rl_runtime.ModelHandle",
    *,
    preferences: "Sequence[Any]",
    config: DpoConfig,
    ref: "rl_runtime.ReferenceLogProbs",
) -> dict[str, float]:
    """Loss, accuracy and margins on held-out preferences."""
    responses, labels_S = rl_runtime.with_labels(preferences)
    kl = kl_of(model, preferences, config, ref)
    log_probs_S = rl_runtime.sequence_log_probs(model, responses, batch_size=2 * config.supervised.batch_size)
    given = (log_probs_S - ref.of(responses), labels_S, kl, config.algorithm)
    return {name: float(values.mean()) for name, values in {"loss": losses(*given), **statistics(*given)}.items()}


def compose(run: "rl_runtime.SupervisedRun", config: DpoConfig) -> "rl_runtime.Objective":
    """The objective: to make chosen responses more likely, and rejected ones less, than the reference does."""
    inputs, batch_size = run.inputs, 2 * config.supervised.batch_size
    ref = rl_runtime.ReferenceLogProbs((*inputs.examples, *inputs.held_out), batch_size=batch_size)
    held_out = rl_runtime.HeldOut(
        [one for one, label in zip(*rl_runtime.with_labels(inputs.held_out), strict=True) if label > 0.5],
        inputs.tokenizer,
        config.supervised,
        partial(measure, preferences=inputs.held_out, config=config, ref=ref),
    )
    return rl_runtime.Objective(
        name=config.algorithm.loss,
        learn=partial(learn, config=config, ref=ref),
        held_out=held_out if inputs.held_out else None,
        prepare=ref.compute,
        state={"reference": ref},
    )


def main(config: DpoConfig) -> None:
    """Trains on the preferences and writes the model, also when a signal stops it before the last step."""
    resolved = rl_runtime.resolve_supervised(config)
    config = resolved.config
    plan = rl_runtime.check_run(config)
    rl_runtime.run_supervised(resolved, plan, partial(compose, config=config))


cli = partial(rl_runtime.run_job_cli, DpoConfig, main)
"""Runs the app from its command line."""


if __name__ == "__main__":
    cli()
